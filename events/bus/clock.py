"""Bus time and the local monotonic clock. Deadlines are bus time; waits are monotonic.

One TIME call ties the two together; the clocks of two machines are never compared.
"""

import time


def monotonic_ms() -> float:
    return time.monotonic() * 1000.0


class BusClock:
    """Bus time as this process knows it, since the last TIME call."""

    __slots__ = ("_offset_ms",)

    def __init__(self) -> None:
        self._offset_ms: float | None = None

    def set(self, bus_ms: float, *, asked_at_ms: float) -> None:
        """Tie `bus_ms` to the middle of the call that began at `asked_at_ms` (monotonic)."""
        self._offset_ms = bus_ms - (asked_at_ms + monotonic_ms()) / 2.0

    @property
    def known(self) -> bool:
        return self._offset_ms is not None

    def now_ms(self) -> int:
        """Bus time in ms; raises RuntimeError before the first TIME call."""
        if self._offset_ms is None:
            raise RuntimeError("bus time is not known before the first TIME call")
        return int(monotonic_ms() + self._offset_ms)

    def seconds_until(self, deadline_ms: int) -> float:
        """Seconds from now until a deadline in bus time; negative when it has passed."""
        return (deadline_ms - self.now_ms()) / 1000.0
