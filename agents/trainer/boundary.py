"""A boundary as a scope: weights may be exported in it, in a thread of its own, while the body runs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread


class Boundary:
    """`with` or `async with`. Leaving it waits for an export that is running, and for the other ranks.

    `serve` is given what tells the body's end, and raises where the other ranks cannot go on.
    """

    def __init__(
        self,
        *,
        enter: Callable[[], None],
        serve: "Callable[[Future[None]], None]",
        leave: Callable[[], None],
    ) -> None:
        self._enter = enter
        self._serve = serve
        self._leave = leave
        self._ending: Future[None] = Future()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="relight-export", daemon=True)

    def __enter__(self) -> Self:
        self._enter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._ending.set_result(None)
            else:
                self._ending.set_exception(error)
            self._thread.join()
        finally:
            self._leave()
        if self._failure is not None and error is None:
            raise self._failure

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.__exit__, kind, error, trace)

    def _run(self) -> None:
        try:
            self._serve(self._ending)
        except Exception as failure:  # noqa: BLE001 -- raised again in the thread that leaves
            self._failure = failure
