"""Whether the version of what an attempt sampled is certain, where the engine itself did not tell it.

Certain is: every decision that was made before now has been read, and none of them touched the weights.
"""

from typing import NamedTuple

import anyio

from relight.agents.replay.route import Boarded
from relight.agents.replay.routes import Routes
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable
from relight.events.ids import BEGINNING, EntryId

CATCH_UP_S = 1.0
"""How long the end of a turn waits to have read every decision that was made before it."""

KEPT_S = 5.0
"""The same for an attempt that broke, also where the bus is away: it may be back. After that its tokens are
sampled again, which mostly takes longer."""

ASK_AGAIN_S = 0.1
"""Between two questions to a bus that does not answer."""

_Position = tuple[int, int]


class _Newest(NamedTuple):
    """The last reading of the newest decision."""

    reading: int
    position: _Position | None


class Certainty:
    """How far decisions have been read, beside how far they go."""

    def __init__(self, job: JobBus, routes: Routes) -> None:
        self._job = job
        self._routes = routes
        self._read_to = _position(BEGINNING)
        self._changed = anyio.Event()
        self._one_reading = anyio.Lock()
        self._readings = 0
        self._newest = _Newest(0, None)

    def advance(self, entry_id: EntryId) -> None:
        """Decisions have been read up to this one."""
        self._read_to = _position(entry_id)
        self.wake()

    def wake(self) -> None:
        """Something may have become certain."""
        self._changed.set()
        self._changed = anyio.Event()

    async def doubt(self, boarded: Boarded) -> str | None:
        """Why the version is not certain; none where it is the route's."""
        if self._routes.blind is not None:
            return self._routes.blind
        return await self._doubt(boarded, CATCH_UP_S)

    async def doubt_of_kept(self, boarded: Boarded) -> str | None:
        """As `doubt`, of tokens that have to be sampled again where it stays: a bus is waited for."""
        return await self._doubt(boarded, KEPT_S)

    async def _doubt(self, boarded: Boarded, within_s: float) -> str | None:
        if not await self._caught_up(within_s):
            return self._routes.blind or "not every decision has been read"
        route = boarded.route
        if boarded.moving or route.moving or route.moves != boarded.moves:
            return f"weights of {route.key.engine}.{route.key.incarnation} were synced under way"
        return None

    async def _caught_up(self, within_s: float) -> bool:
        with anyio.move_on_after(within_s):
            target = await self._end()
            while self._routes.blind is not None or self._read_to < target:
                await self._changed.wait()
            return True
        return False

    async def _end(self) -> _Position:
        """Where the newest decision stands; asks until the bus tells. The caller gives the deadline."""
        while True:
            if (target := await self._newest_decision()) is not None:
                return target
            await anyio.sleep(ASK_AGAIN_S)

    async def _newest_decision(self) -> _Position | None:
        """As a reading tells it that began after the call; none without the bus.

        A death breaks many attempts at once: they share one reading, or they would crowd the bus.
        """
        asked = self._readings
        async with self._one_reading:
            if self._newest.reading <= asked:
                self._readings = reading = self._readings + 1
                self._newest = _Newest(reading, await self._read_newest())
            return self._newest.position

    async def _read_newest(self) -> _Position | None:
        try:
            newest = await self._job.tail(self._job.keys.decisions, count=1)
        except BusUnavailable:
            return None
        return _position(newest[-1].entry_id if newest else BEGINNING)


def _position(entry_id: EntryId) -> _Position:
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)
