"""From one who reads the bus to many who look: frames for each, in a queue that is bounded.

Who takes too long is told to begin anew, and costs no more than its queue held.
"""

from collections import deque

import anyio

from relight.orchestrator.dashboard import frames
from relight.orchestrator.dashboard.tape import Place

ROOM = 1 << 20
"""Bytes that may wait for one reader: some thousand entries, many seconds of a busy job."""


class Subscription:
    """What waits for one reader."""

    def __init__(self, place: Place | None = None, *, room: int | None = None) -> None:
        self.place = place
        """What it has of a job's streams; none once it was told what is behind that."""
        self._room = ROOM if room is None else room
        self._waiting: deque[bytes] = deque()
        self._levels: dict[str, bytes] = {}
        self._size = 0
        self._stirred = anyio.Event()
        self.over = False
        """Nothing more will come; the reader is to begin anew."""

    def put(self, frame: bytes) -> None:
        """A frame that must not be left out."""
        if self.over:
            return
        self._size += len(frame)
        if self._size > self._room:
            self.end("this page could not keep up")
            return
        self._waiting.append(frame)
        self._stirred.set()

    def show(self, name: str, frame: bytes) -> None:
        """A frame that says how things stand: it takes the place of one of the same name."""
        if not self.over:
            self._levels[name] = frame
            self._stirred.set()

    def end(self, why: str) -> None:
        """Drop what waits and tell the reader to begin anew."""
        self._waiting.clear()
        self._levels.clear()
        self._waiting.append(frames.event("reload", {"why": why}))
        self.over = True
        self._stirred.set()

    async def take(self) -> bytes:
        """All that waits, as soon as there is any."""
        await self._stirred.wait()
        self._stirred = anyio.Event()
        taken = b"".join([*self._waiting, *self._levels.values()])
        self._waiting.clear()
        self._levels.clear()
        self._size = 0
        return taken


class Channel:
    """Those who look at one thing."""

    def __init__(self) -> None:
        self.readers: set[Subscription] = set()

    def put(self, frame: bytes) -> None:
        for reader in self.readers:
            reader.put(frame)

    def show(self, name: str, frame: bytes) -> None:
        for reader in self.readers:
            reader.show(name, frame)

    def end(self, why: str) -> None:
        for reader in self.readers:
            reader.end(why)
