"""When an engine whose processes live is dead all the same: no answer from its core and no progress.

Pure: times in, verdicts out. Two signals. The RPC (an answer of the core's loop) and the progress (tokens
and iterations in /metrics): either one moves the last sign of life, so a busy engine whose answers are late
is not dead while tokens grow. Without metrics progress is unknown, not zero, and more patience is due.
"""

from enum import Enum

from relight.agents.adapters.vllm import Counters

BLIND_FACTOR = 3.0
"""Patience where progress cannot be seen, or where the core answers and only tokens stand still."""


class Verdict(Enum):
    WELL = "well"
    STALLED = "stalled"
    """Dead."""
    DOUBTFUL = "doubtful"
    """The core answers, calls wait, no token comes: let it generate."""


class Vigil:
    """Signs of life of one incarnation; all times are monotonic seconds."""

    def __init__(self, *, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._seen: Counters | None = None
        self.excuse(now)

    @property
    def blind(self) -> bool:
        """Whether the counters were never seen: the first reading is what later ones are compared with."""
        return self._seen is None

    def excuse(self, now: float) -> None:
        """Begin anew: it was paused, loading or starting, or this agent itself stood still."""
        self.alive = now
        """Last sign of life."""
        self._moved = now
        self._seen_since_alive = 0

    def held(self, now: float) -> None:
        """It is paused: no token is due."""
        self._moved = now

    def answered(self, now: float) -> None:
        """The core answered."""
        self.alive = now
        self._seen_since_alive = 0

    def told(self, now: float, counters: Counters | None) -> None:
        """The counters as they are; None where they cannot be had."""
        if counters is None:
            return
        if self._seen is None or counters.tokens != self._seen.tokens:
            self._moved = now
            if self._seen is not None:
                self.alive = now
                self._seen_since_alive = 0
        if counters.running + counters.waiting == 0:
            self._moved = now
        self._seen = counters
        self._seen_since_alive += 1

    def verdict(self, now: float) -> Verdict:
        silent = now - self.alive
        known = self._seen_since_alive >= 2
        if silent >= self._stall_s * (1.0 if known else BLIND_FACTOR):
            return Verdict.STALLED
        if now - self._moved >= self._stall_s * BLIND_FACTOR:
            return Verdict.DOUBTFUL
        return Verdict.WELL
