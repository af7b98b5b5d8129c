"""Whether the kernel killed for lack of memory on this machine just now."""

from collections import deque

from relight.agents.node import proc
from relight.events.bus.clock import monotonic_ms

FREEING_S = 10.0
"""A process is counted when it is chosen, and has ended only once what it held is freed: seconds, where that
is hundreds of GB."""


class Shortage:
    """The kernel's count of such kills, as it was looked at now and then."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()
        """When, in monotonic ms, and the count; at most the first one is older than FREEING_S."""

    def look(self) -> None:
        """Remember the count as it is."""
        count, now = proc.oom_kills(), monotonic_ms()
        if count is None:
            return
        self._looks.append((now, count))
        while len(self._looks) > 1 and self._looks[1][0] <= now - 1000.0 * FREEING_S:
            self._looks.popleft()

    def killed(self) -> bool:
        """Whether there was one within FREEING_S, or since the last look before that."""
        count = proc.oom_kills()
        return bool(self._looks) and count is not None and count > self._looks[0][1]
