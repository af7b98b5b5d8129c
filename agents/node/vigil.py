"""When an engine whose processes live is dead all the same: no answer from its core and no progress.

Pure: times in, verdicts out. Two signals. The RPC (an answer of the core's loop) and the progress (tokens
and iterations in /metrics): either one moves the last sign of life, so a busy engine whose answers are late
is not dead while tokens grow. Without metrics progress is unknown, not zero, and more patience is due.
"""

from enum import Enum

from relight.agents.adapters.vllm import Counters

BLIND_FACTOR = 3.0
"""Patience where progress cannot be seen, or where the core answers and only tokens stand still."""
HELD_FACTOR = 12.0
"""Patience while it is paused or asleep: whoever holds it may have its core do something that takes long."""
STEPS = 10.0
"""A stall is at least this many of the engine's own iterations without a sign of life."""
STEPS_FACTOR = 6.0
"""A slow engine's stall window grows to at most this many times the setting."""


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
        self._step_s = 0.0
        self._stepped: tuple[float, float] | None = None
        """When iterations were last seen to have been done while it was busy, and how many."""
        self._seen: Counters | None = None
        self._held = False
        self.excuse(now)

    @property
    def window_s(self) -> float:
        """Silence that is a stall: the setting, or more for an engine whose iterations are slow."""
        return min(max(self._stall_s, STEPS * self._step_s), STEPS_FACTOR * self._stall_s)

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
        """It is paused or asleep: no token is due."""
        self._moved = now
        self._held = True

    def released(self) -> None:
        """It is neither paused nor asleep."""
        self._held = False

    def answered(self, now: float) -> None:
        """The core answered."""
        self.alive = now
        self._seen_since_alive = 0

    def told(self, now: float, counters: Counters | None) -> None:
        """The counters as they are; None where they cannot be had."""
        if counters is None:
            return
        self._learn(now, counters)
        if self._seen is None or counters.tokens != self._seen.tokens:
            self._moved = now
            if self._seen is not None:
                self.alive = now
                self._seen_since_alive = 0
        if counters.running + counters.waiting == 0:
            self._moved = now
        self._seen = counters
        self._seen_since_alive += 1

    def _learn(self, now: float, counters: Counters) -> None:
        """How long an iteration takes; one that takes longer than others is forgotten again slowly."""
        if counters.running == 0 or self._stepped is None or counters.steps < self._stepped[1]:
            self._stepped = (now, counters.steps)
        elif counters.steps > self._stepped[1]:
            step_s = (now - self._stepped[0]) / (counters.steps - self._stepped[1])
            self._step_s = max(step_s, self._step_s / 2.0)
            self._stepped = (now, counters.steps)

    def verdict(self, now: float) -> Verdict:
        silent = now - self.alive
        known = self._seen_since_alive >= 2
        factor = HELD_FACTOR if self._held else 1.0 if known else BLIND_FACTOR
        if silent >= self.window_s * factor:
            return Verdict.STALLED
        if now - self._moved >= self.window_s * BLIND_FACTOR:
            return Verdict.DOUBTFUL
        return Verdict.WELL
