"""Virtual time: one heap of what happens when, coroutines that are stepped by hand, processes that own them.

Everything happens in one thread, in the order of virtual time and, within one moment, in the order in which
it was asked for. So a run depends on its seed alone. A process may be frozen (what wakes it waits until it is
thawed) or killed (nothing of it runs again, not even its clean-up).
"""

import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from heapq import heappop, heappush
from typing import Any

Do = Callable[..., object]

LEAST_S = 1e-6
"""A wait that is shorter takes this long: less may vanish beside the time that it is added to."""


class Cancelled(BaseException):
    """What a cancelled coroutine gets at each wait, as in anyio."""


class Ended(BaseException):
    """What a coroutine of a killed process gets where its clean-up would do something."""


class Kernel:
    """The clock, and everything that is due."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds."""
        self.events = 0
        self.task: Task | None = None
        """The one that runs."""
        self.process: Process | None = None
        """Whose code runs."""
        self._heap: list[tuple[float, int, Do, tuple[Any, ...]]] = []
        self._soon: deque[tuple[Do, tuple[Any, ...]]] = deque()
        self._serial = 0
        self._halted: Exception | None = None

    def halt(self, error: Exception) -> None:
        """End the run with `error` after what runs now; the first one counts."""
        self._halted = self._halted or error

    def at(self, when: float, do: Do, *args: Any) -> None:
        """Call `do` at `when`; at once, after what runs now, where that is not ahead."""
        self._serial += 1
        heappush(self._heap, (when, self._serial, do, args))

    def after(self, seconds: float, do: Do, *args: Any) -> None:
        if 0.0 < seconds < LEAST_S:
            seconds = LEAST_S
        self._serial += 1
        heappush(self._heap, (self.now + seconds, self._serial, do, args))

    def soon(self, do: Do, *args: Any) -> None:
        """Call `do` in this moment, after what runs now."""
        self._soon.append((do, args))

    def run(self, until: float) -> None:
        """Let everything happen that is due up to `until`; raises what halts it."""
        heap, soon = self._heap, self._soon
        while self._halted is None:
            while soon and self._halted is None:
                do, args = soon.popleft()
                self.events += 1
                do(*args)
            if not heap or heap[0][0] > until:
                break
            when, _, do, args = heappop(heap)
            self.now = max(self.now, when)
            self.events += 1
            do(*args)
        if self._halted is not None:
            raise self._halted
        self.now = max(self.now, until)


class Process:
    """A process somewhere: its coroutines live and end with it."""

    def __init__(self, kernel: Kernel, name: str, *, skew_s: float = 0.0) -> None:
        self.kernel = kernel
        self.name = name
        self.skew_s = skew_s
        """How far its own clocks are from virtual time."""
        self.alive = True
        self.frozen = False
        self.failed: Callable[[BaseException], object] | None = None
        """Told what ended the process from within."""
        self.tasks: dict[Task, None] = {}
        self._backlog: list[tuple[Do, tuple[Any, ...]]] = []

    def spawn(self, coro: Coroutine[Any, Any, Any], *, tag: str = "") -> "Task":
        return Task(self, coro, tag=tag)

    def ready(self, do: Do, *args: Any) -> bool:
        """Whether its code may run now; for a frozen one `do` waits until it may."""
        if not self.alive:
            return False
        if self.frozen:
            self._backlog.append((do, args))
            return False
        return True

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for do, args in backlog:
            self.kernel.soon(do, *args)

    def kill(self) -> None:
        """End it as SIGKILL does."""
        self.alive = False
        for task in list(self.tasks):
            task.drop()
        self.tasks.clear()
        self._backlog.clear()


class Task:
    """One coroutine under way. Whoever wakes it names the wait that it means: late wakes change nothing."""

    __slots__ = ("_coro", "ended", "process", "scope", "tag", "turn")

    def __init__(self, process: Process, coro: Coroutine[Any, Any, Any], *, tag: str = "") -> None:
        self.process = process
        self.tag = tag
        self.turn = 0
        self.scope: Any = None
        """The innermost cancel scope."""
        self.ended: Callable[[BaseException | None], object] | None = None
        self._coro = coro
        process.tasks[self] = None
        process.kernel.soon(self.wake, 0)

    def wake(self, turn: int, value: Any = None) -> None:
        """Go on from wait number `turn` with `value`."""
        if turn == self.turn and self.process.ready(self.wake, turn, value):
            self._step(self._coro.send, value)

    def fail(self, turn: int, error: BaseException) -> None:
        """Go on from wait number `turn` with an error."""
        if turn == self.turn and self.process.ready(self.fail, turn, error):
            self._step(self._coro.throw, error)

    def drop(self) -> None:
        """Let go of the coroutine; its process is dead, so nothing that it does has an effect."""
        self.turn += 1
        if self.process.kernel.task is self:
            return  # it ends its own process, and itself at its next wait
        with suppress(Ended, RuntimeError):
            self._coro.close()

    def _step(self, resume: Callable[[Any], object], value: Any) -> None:
        process = self.process
        kernel = process.kernel
        outer = kernel.task, kernel.process
        self.turn += 1
        kernel.task, kernel.process = self, process
        try:
            resume(value)
        except StopIteration:
            self._end(None)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 -- judged by whoever started the task
            self._end(error)
        finally:
            kernel.task, kernel.process = outer

    def _end(self, error: BaseException | None) -> None:
        process = self.process
        process.tasks.pop(self, None)
        if isinstance(error, Ended):
            return
        if self.ended is not None:
            self.ended(error)
        elif error is not None and not isinstance(error, Cancelled):
            if process.failed is None:
                raise error
            process.failed(error)


@types.coroutine
def parked() -> Generator[None, Any, Any]:
    """Wait until somebody wakes or fails the task."""
    return (yield)
