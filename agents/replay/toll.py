"""What the ends of a turn's attempts so far mean for the rest of it. Pure.

Failures are ends; deaths are engines, each incarnation once: one that resets a turn's connection twice has
died at most once.
"""

from relight.agents.replay.limits import BACKOFF_S, COUNTED, DEATHS, POISON, RESTED, SUSPECT
from relight.agents.replay.route import Key
from relight.agents.replay.turn import End


class Toll:
    """One turn's failures, and whom its next attempt spares. `most`: the failures that it may meet."""

    def __init__(self, most: int) -> None:
        self.failures = 0
        self.avoid: Key | None = None
        self.rest_s: float | None = None
        """How long the next attempt waits; none for not at all."""
        self._most = most
        self._deaths: set[Key] = set()
        self._rests = 0

    def count(self, end: End, key: Key, *, rest_s: float, chance: float) -> None:
        """An attempt on `key` has ended. `rest_s`: what it asks to be left alone; `chance`: in [0, 1)."""
        if end is not End.VERSION_MOVED:
            self.avoid = key
        if end in RESTED:
            wait_s = max(rest_s, BACKOFF_S[min(self._rests, len(BACKOFF_S) - 1)])
            self.rest_s = wait_s * (1.0 + 0.5 * chance)
            self._rests += 1
        if end in COUNTED:
            self.failures += 1
        if end in DEATHS:
            self._deaths.add(key)

    def rested(self) -> None:
        self.rest_s = None

    def progressed(self) -> None:
        """A token came: what was busy is no more."""
        self._rests = 0

    @property
    def elsewhere(self) -> bool:
        """The rest may be spared by going to another engine: only one of them has been found busy."""
        return self._rests <= 1

    @property
    def suspect(self) -> bool:
        """It may be the turn that kills."""
        return len(self._deaths) >= SUSPECT

    @property
    def poison(self) -> bool:
        return len(self._deaths) >= POISON

    @property
    def spent(self) -> bool:
        """The turn has met as many failures as it may."""
        return self.failures >= self._most
