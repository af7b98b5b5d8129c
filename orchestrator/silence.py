"""Silence: which sources' signs of life have stood still, by this process's own monotonic clock.

What counts is that a number advances, never what a clock elsewhere says. Everybody gets one fresh grace
period when a term begins, since nobody knows how long the orchestrator was away.
"""

from collections.abc import Iterable, Mapping

from relight.events.bus.job import Pulse
from relight.events.ids import Source


class Silence:
    """When each source's pulse was last seen to advance."""

    def __init__(self) -> None:
        self._seen: dict[Source, tuple[Pulse | None, float]] = {}

    def look(self, pulses: Mapping[Source, Pulse], expected: Iterable[Source], *, now_s: float) -> None:
        """Note which of the `expected` sources have advanced; `now_s` is monotonic."""
        expected = set(expected)
        for source in expected:
            pulse = pulses.get(source)
            last = self._seen.get(source)
            if last is None or (pulse is not None and pulse != last[0]):
                self._seen[source] = (pulse, now_s)
        for source in self._seen.keys() - expected:
            del self._seen[source]

    def silent_s(self, source: Source, *, now_s: float) -> float:
        """For how long the source's pulse has stood still."""
        _, at = self._seen.get(source, (None, now_s))
        return now_s - at
