"""Sharing one loop and one pool of connections between many jobs, so that none of them starves another."""

import time

import anyio
import anyio.lowlevel

SLICE_S = 0.0002
"""How long one job computes before others may: about one step of a job with a hundred engines."""

TURNS = 8
"""Turns of the loop that are left to others after each slice: from a socket that can be read to a commit that
is sent takes a job some turns, and with one turn a slice each of them would wait for a slice of a storm."""


class Lanes:
    """How many jobs do the same thing at a time. Whoever waits longest is next."""

    def __init__(self) -> None:
        self.beginning = anyio.Semaphore(6, fast_acquire=True)
        """Terms that take their job over."""
        self.connecting = anyio.Semaphore(16, fast_acquire=True)
        """Readers that connect: a thousand at once would overrun the server's queue of new connections."""
        self.commands = anyio.Semaphore(8, fast_acquire=True)
        """Calls under way: with those of the process itself fewer than the pool has connections."""


class Slice:
    """A share of the loop's time, from the moment it is made."""

    __slots__ = ("_since_s",)

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def shared(self) -> None:
        """Let others go first where the share is used up."""
        if time.perf_counter() - self._since_s >= SLICE_S:
            for _ in range(TURNS):
                await anyio.lowlevel.checkpoint()
            self._since_s = time.perf_counter()
