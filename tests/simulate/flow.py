"""What the product's coroutines use of anyio, asyncio, threading, time and chance, on the kernel's time.

Meant to be put in place of those names inside the modules that run in a simulation (`stage`). Semantics are
anyio's: cancellation is level-triggered and comes at waits, a task group ends with all that is in it, and its
errors come as a group.
"""

from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from tests.simulate.kernel import Cancelled, Ended, Kernel, Process, Task, parked

START_MS = 1_700_000_000_000
"""Unix time at which a run begins."""


class Flow:
    """All of it, for one kernel."""

    def __init__(self, kernel: Kernel, random: Random) -> None:
        self.kernel = kernel
        self.random = random
        self.uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{random.getrandbits(64):016x}"))
        self.anyio = SimpleNamespace(
            CancelScope=lambda **options: Scope(kernel, **options),
            Event=lambda: Event(kernel),
            Lock=lambda: Semaphore(kernel, 1),
            Semaphore=lambda value, **_: Semaphore(kernel, value),
            create_task_group=lambda: Group(kernel),
            current_time=lambda: kernel.now + self._skew_s(),
            fail_after=lambda delay: Scope(kernel, delay=delay, fails=True),
            move_on_after=lambda delay, shield=False: Scope(kernel, delay=delay, shield=shield),
            sleep=self.sleep,
            sleep_forever=self.sleep_forever,
        )
        self.asyncio = SimpleNamespace(get_running_loop=lambda: Loop(kernel), TimerHandle=Timer)
        self.time = SimpleNamespace(monotonic=self.monotonic, perf_counter=self.monotonic, time=self.unix)
        self.threading = SimpleNamespace(Condition=lambda: Condition(kernel))

    def monotonic(self) -> float:
        return self.kernel.now + self._skew_s()

    def unix(self) -> float:
        return START_MS / 1000.0 + self.kernel.now + self._skew_s()

    def _skew_s(self) -> float:
        process = self.kernel.process
        return process.skew_s if process is not None else 0.0

    async def sleep(self, seconds: float) -> None:
        task = running(self.kernel)
        self.kernel.after(max(0.0, seconds), task.wake, task.turn)
        await parked()

    async def sleep_forever(self) -> None:
        running(self.kernel)
        await parked()


def running(kernel: Kernel) -> Task:
    """The task that is about to wait; raises where it must not: it is cancelled, or its process is dead."""
    task = kernel.task
    if task is None or not task.process.alive:
        raise Ended
    if task.scope is not None and task.scope.covers_cancelled():
        raise Cancelled
    return task


class Scope:
    """A cancel scope, with or without a deadline."""

    def __init__(
        self, kernel: Kernel, *, delay: float = float("inf"), shield: bool = False, fails: bool = False
    ) -> None:
        self._kernel = kernel
        self._delay = delay
        self._shield = shield
        self._fails = fails
        self._host: Task | None = None
        self._parent: Scope | None = None
        self.cancel_called = False
        self.cancelled_caught = False

    def covers_cancelled(self) -> bool:
        """Whether this scope, or one around it that reaches through, is cancelled."""
        scope: Scope | None = self
        while scope is not None:
            if scope.cancel_called:
                return True
            if scope._shield:
                return False
            scope = scope._parent
        return False

    def cancel(self) -> None:
        if self.cancel_called:
            return
        self.cancel_called = True
        if self._host is None:
            return
        for task in list(self._host.process.tasks):
            if task.scope is not None and task is not self._kernel.task and task.scope.covers_cancelled():
                self._kernel.soon(task.fail, task.turn, Cancelled())

    def __enter__(self) -> Self:
        task = self._kernel.task
        if task is None:
            raise Ended
        self._host, self._parent, task.scope = task, task.scope, self
        if self._delay != float("inf"):
            self._kernel.after(max(0.0, self._delay), self._expire)
        return self

    def _expire(self) -> None:
        host = self._host
        if host is not None and host.process.ready(self._expire):
            self.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._host is not None
        self._host.scope, self._host = self._parent, None
        if not (isinstance(error, Cancelled) and self.cancel_called):
            return False
        if self._parent is not None and self._parent.covers_cancelled() and not self._shield:
            return False
        self.cancelled_caught = True
        if self._fails:
            raise TimeoutError
        return True


class Event:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._set = False
        self._waiting: list[tuple[Task, int]] = []

    def set(self) -> None:
        self._set = True
        for task, turn in self._waiting:
            self._kernel.soon(task.wake, turn)
        self._waiting.clear()

    def is_set(self) -> bool:
        return self._set

    async def wait(self) -> None:
        if self._set:
            return
        task = running(self._kernel)
        self._waiting.append((task, task.turn))
        await parked()


class Semaphore:
    """Whoever waits longest is next."""

    def __init__(self, kernel: Kernel, value: int) -> None:
        self._kernel = kernel
        self._free = value
        self._waiting: deque[Event] = deque()

    async def __aenter__(self) -> None:
        while self._free == 0:
            turn = Event(self._kernel)
            self._waiting.append(turn)
            await turn.wait()
        self._free -= 1

    async def __aexit__(self, *_: object) -> None:
        self._free += 1
        if self._waiting:
            self._waiting.popleft().set()


class Group:
    """A task group."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.cancel_scope = Scope(kernel)
        self._children = 0
        self._errors: list[BaseException] = []
        self._changed = Event(kernel)

    async def __aenter__(self) -> Self:
        self.cancel_scope.__enter__()
        return self

    def start_soon(self, function: Callable[..., Any], *args: Any, name: str = "") -> None:
        host = self._kernel.task
        assert host is not None
        task = host.process.spawn(function(*args), tag=host.tag)
        task.scope = self.cancel_scope
        task.ended = self._ended
        self._children += 1

    def _ended(self, error: BaseException | None) -> None:
        self._children -= 1
        if error is not None and not isinstance(error, Cancelled):
            self._errors.append(error)
            self.cancel_scope.cancel()
        self._changed.set()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, GeneratorExit | Ended):
            return False
        if error is not None:
            if not isinstance(error, Cancelled):
                self._errors.append(error)
            self.cancel_scope.cancel()
        while self._children:
            self._changed = Event(self._kernel)
            try:
                await self._changed.wait()
            except Cancelled as cancelled:
                error = error or cancelled
                self.cancel_scope.cancel()
                await self._drained()
        caught = self.cancel_scope.__exit__(
            type(error) if error is not None else None,
            error if isinstance(error, Cancelled) else None,
            None,
        )
        if self._errors:
            raise BaseExceptionGroup("unhandled errors in a TaskGroup", self._errors)
        if isinstance(error, Cancelled) and not caught:
            raise error
        return caught

    async def _drained(self) -> None:
        """Wait for the children whatever is cancelled."""
        with Scope(self._kernel, shield=True):
            while self._children:
                self._changed = Event(self._kernel)
                await self._changed.wait()


class Timer:
    """What `call_later` gives."""

    def __init__(self, process: Process, do: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._process = process
        self._do = do
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def fire(self) -> None:
        if self._cancelled or not self._process.ready(self.fire):
            return
        kernel = self._process.kernel
        outer, kernel.process = kernel.process, self._process
        try:
            self._do(*self._args)
        finally:
            kernel.process = outer


class Loop:
    """The running loop, as far as timers go."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def call_later(self, delay: float, do: Callable[..., object], *args: Any) -> Timer:
        assert self._kernel.process is not None
        timer = Timer(self._kernel.process, do, args)
        self._kernel.after(max(0.0, delay), timer.fire)
        return timer

    def call_at(self, when: float, do: Callable[..., object], *args: Any) -> Timer:
        assert self._kernel.process is not None
        return self.call_later(when - self._kernel.now - self._kernel.process.skew_s, do, *args)


class Parked(Exception):
    """A plain function would block here: its driver waits in its place and calls it again."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s


class Condition:
    """A condition whose waits end the call (`Parked`); `changed` is what the driver waits for."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.changed = Event(kernel)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def notify_all(self) -> None:
        changed, self.changed = self.changed, Event(self._kernel)
        changed.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        raise Parked(timeout_s)

    def wait_for(self, holds: Callable[[], object], timeout_s: float | None = None) -> bool:
        if holds():
            return True
        raise Parked(timeout_s)

    async def again(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, called again whenever it would block and something has changed."""
        while True:
            changed = self.changed
            try:
                return function()
            except Parked as wait:
                timeout_s = float("inf") if wait.timeout_s is None else wait.timeout_s
                with Scope(self._kernel, delay=timeout_s):
                    await changed.wait()
