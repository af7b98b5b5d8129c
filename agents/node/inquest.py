"""Why an engine is dead, from the processes of it that ended.

They end together: a core that is killed takes its worker along, and the worker may be seen first. So where
another one is on its way out too, and none was killed so far, the verdict waits a moment for it.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from relight.agents.node import proc
from relight.agents.node.owned import Owned
from relight.agents.node.pidfd import Status
from relight.agents.node.tree import Exit
from relight.events.bus.clock import monotonic_ms
from relight.events.values import Cause

SETTLE_S = 0.025
"""Longest wait for the others: a killed process closes its files, which its worker notices, and then frees
its memory, before it is seen to have ended."""
ENDING_S = 1.0
"""Longest wait for the end of a process that is on its way out: it may hang there, in a driver."""
BLAME = ("core", "worker", "leader", "other")
"""Who is told of those that ended together, unless one was killed."""


class Verdict(NamedTuple):
    """What EngineDead says."""

    cause: Cause
    status: Status
    detail: str
    seen_ms: float | None
    """Monotonic time at which the kernel told us of the first one."""


class Inquest:
    """Hears of vital processes that ended; `tell` is called once for those that ended together."""

    def __init__(self, owned: Owned, *, tell: Callable[[Verdict], None]) -> None:
        self._owned = owned
        self._tell = tell
        self._exits: list[Exit] = []
        self._waiting: asyncio.TimerHandle | None = None

    def hear(self, exited: Exit) -> None:
        """Take note of one more."""
        self._exits.append(exited)
        self.close()
        delay_s = 0.0
        if exited.status.signal is None and self._others_are_exiting():
            delay_s = SETTLE_S - (monotonic_ms() - self._exits[0].seen_ms) / 1000.0
        self._waiting = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._decide)

    def if_nothing_ends(self, tell: Callable[[], None]) -> None:
        """Call `tell` now; where a vital process is ending, whose end says more, only if none is heard of."""
        if self._waiting is not None:
            return
        if self._others_are_exiting():
            self._waiting = asyncio.get_running_loop().call_later(ENDING_S, self._give_up, tell)
        else:
            tell()

    def _give_up(self, tell: Callable[[], None]) -> None:
        self._waiting = None
        tell()

    def close(self) -> None:
        """Decide nothing any more."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _others_are_exiting(self) -> bool:
        tree = self._owned.tree
        return tree is not None and any(
            proc.is_exiting(process) for process in {*tree.vital} & {*tree.living}
        )

    def _decide(self) -> None:
        exits, self._exits, self._waiting = self._exits, [], None
        root = min(exits, key=lambda each: (each.status.signal is None, BLAME.index(each.role)))
        detail = f"its {root.role} (pid {root.process.pid}) ended{_how(root.status)}"
        self._tell(Verdict(self._cause(root.status), root.status, detail, exits[0].seen_ms))

    def _cause(self, status: Status) -> Cause:
        if status.signal is None:
            return Cause.EXIT
        return Cause.OOM if status.signal == 9 and self._owned.shortage.killed() else Cause.SIGNAL


def _how(status: Status) -> str:
    if status.signal is not None:
        return f" by signal {status.signal}"
    return f" with code {status.code}" if status.code is not None else ""
