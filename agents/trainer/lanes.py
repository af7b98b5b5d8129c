"""Where the application's function runs while its own thread waits to export: a daemon thread, or a loop.

Threads are daemons, since what runs in them is not ours to stop: a process that ends does not wait for a
rollout. Each run sees the context variables of its caller.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

CANCEL_S = 5.0
"""How long a cancelled coroutine may take to clean up before its caller goes on without it."""


class Work(Generic[T]):
    """One function under way."""

    def __init__(self) -> None:
        self.future: Future[T] = Future()
        self.cancelling: Callable[[], object] | None = None
        """Asks a coroutine to end; None where nothing can: a plain function."""

    def result(self) -> T:
        """Wait for it and return or raise what it does; what interrupts the wait cancels it."""
        try:
            return self.future.result()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ask a coroutine to end and give it CANCEL_S for that."""
        if self.cancelling is not None:
            self.cancelling()
            wait([self.future], CANCEL_S)


class Lane:
    """Threads for plain functions, and one lasting event loop, made when first needed, for the others."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, fn: "Callable[[], T | Awaitable[T]]") -> Work[T]:
        """Begin `fn`: a coroutine function in the loop, any other in a thread of its own.

        What a plain function returns is awaited in the loop where that can be.
        """
        work: Work[T] = Work()
        context = contextvars.copy_context()
        if inspect.iscoroutinefunction(fn):
            self._schedule(cast("Callable[[], Awaitable[T]]", fn), work, context)
            return work

        def body() -> None:
            try:
                result = context.run(fn)
            except BaseException as error:  # noqa: BLE001 -- raised again where the result is asked for
                work.future.set_exception(error)
                return
            if inspect.isawaitable(result):
                awaitable = cast("Awaitable[T]", result)
                self._schedule(lambda: awaitable, work, context)
            else:
                work.future.set_result(result)

        threading.Thread(target=body, name="relight-wait", daemon=True).start()
        return work

    def call(self, fn: "Callable[[], T | Awaitable[T]]") -> T:
        """`fn`'s result: a plain function is called right here, what is awaitable goes to the loop."""
        if inspect.iscoroutinefunction(fn):
            started: Work[T] = self.start(fn)
            return started.result()
        result: object = fn()
        if not inspect.isawaitable(result):
            return cast("T", result)
        awaitable = cast("Awaitable[T]", result)
        work: Work[T] = self.start(lambda: awaitable)
        return work.result()

    def close(self) -> None:
        """End the loop; what still runs in it is cancelled."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CANCEL_S)
            self._loop = None

    def _schedule(
        self, fn: "Callable[[], Awaitable[T]]", work: Work[T], context: contextvars.Context
    ) -> None:
        loop = self._lasting()

        async def body() -> None:
            try:
                work.future.set_result(await fn())
            except BaseException as error:  # noqa: BLE001 -- raised again where the result is asked for
                work.future.set_exception(error)

        def begin() -> None:
            task = loop.create_task(body(), context=context)
            tasks.append(task)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        tasks: list[asyncio.Task[None]] = []
        work.cancelling = lambda: loop.call_soon_threadsafe(cancel)
        loop.call_soon_threadsafe(begin)

    def _lasting(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_turn, args=(self._loop,), name="relight-loop", daemon=True
            )
            self._thread.start()
        return self._loop


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """Run `loop` until it is stopped, then end what is in it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        rest: set[asyncio.Task[Any]] = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        if rest:
            loop.run_until_complete(asyncio.wait(rest, timeout=CANCEL_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
