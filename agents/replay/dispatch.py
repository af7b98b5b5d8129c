"""The routes as they are followed on the bus, and the calls that are under way on them.

One task follows; calls wait for its events and never poll. A fence ends all calls of its incarnation at
once, or after its drain time. Hints to the orchestrator and aborts to engines are said in the background:
they may be lost without harm.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import aiohttp
import anyio
from anyio.abc import TaskGroup

from relight.agents.replay.routes import Change, Freed, Route, Routes, Spared
from relight.agents.replay.stream import Flight
from relight.agents.replay.turn import End
from relight.events.bus.follow import Away, Decided, Follower, Noted, Synced
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.facts import RouteSuspected
from relight.events.ids import BEGINNING, EngineName, EntryId, Source
from relight.events.version import Version

log = logging.getLogger(__name__)

SUSPICION_S = 30.0
"""A suspected route that no decision has named for that long is tried again: the orchestrator may be away,
or the failure may not have been the engine's."""

CATCH_UP_S = 1.0
"""How long a broken attempt waits to have read every decision that was made before it broke."""

SAID_S = 2.0
"""A hint or an abort that takes longer is given up."""

BACKLOG = 1024
"""Hints and aborts under way at once; more are dropped."""

RETRY_S = 1.0


class Boarded(NamedTuple):
    """What was known of the route when an attempt began."""

    route: Route
    version: Version
    moves: int
    moving: bool


class Dispatch:
    """Routes, the flights on them, and whoever waits for a route. `run` keeps them up to date."""

    def __init__(self, job: JobBus, http: aiohttp.ClientSession, *, source: Source) -> None:
        self.routes = Routes()
        self._job = job
        self._http = http
        self._source = source
        self._flights: dict[Route, set[Flight]] = {}
        self._changed = anyio.Event()
        self._read_to = _position(BEGINNING)
        self._synced = anyio.Event()
        self._timers: dict[Route, asyncio.TimerHandle] = {}
        self._one_reading = anyio.Lock()
        self._readings = 0
        self._newest = _Newest(0, None)
        self._tasks: TaskGroup | None = None
        self._saying = 0

    async def synced(self) -> None:
        """Return when the state has been read once. The caller gives the deadline."""
        await self._synced.wait()

    async def run(self, tasks: TaskGroup) -> None:
        """Follow decisions, for ever."""
        self._tasks = tasks
        follower = Follower(self._job)
        try:
            while True:
                await self._next(follower)
        finally:
            self._tasks = None
            for timer in self._timers.values():
                timer.cancel()

    async def _next(self, follower: Follower) -> None:
        try:
            event = await follower.next()
        except Undecodable as error:
            self.routes.lose(f"the state cannot be read: {error}")
            log.warning("the state of job %s cannot be read: %s", self._job.name, error)
            await anyio.sleep(RETRY_S)
            return
        match event:
            case Synced(snapshot=snapshot, stamp=stamp):
                self._carry_out(self.routes.read(snapshot, stamp=stamp))
                self._advance(snapshot.tail)
                self._synced.set()
            case Decided(entry=entry, decision=decision):
                self._carry_out(self.routes.apply(decision))
                self._advance(entry.entry_id)
            case Noted(entry=entry):
                self._advance(entry.entry_id)
            case Away(reason=reason):
                self.routes.lose(reason)
                log.warning(
                    "job %s: %s; going on with %d held routes", self._job.name, reason, len(self.routes)
                )
                self._wake()
            case _:
                pass

    def _advance(self, entry_id: EntryId) -> None:
        self._read_to = _position(entry_id)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _carry_out(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Freed(route=route, after_s=after_s, why=why):
                    if after_s > 0.0:
                        self._after(after_s, route, partial(self._free, route, why))
                    else:
                        self._free(route, why)
                case Spared(route=route):
                    if (timer := self._timers.pop(route, None)) is not None:
                        timer.cancel()

    def _after(self, after_s: float, route: Route, do: Callable[[], None]) -> None:
        if (timer := self._timers.get(route)) is not None:
            timer.cancel()
        self._timers[route] = asyncio.get_running_loop().call_later(after_s, do)

    def _free(self, route: Route, why: str) -> None:
        if (timer := self._timers.pop(route, None)) is not None:
            timer.cancel()
        self.routes.forget(route)
        for flight in tuple(self._flights.get(route, ())):
            flight.cut(End.FENCED, why)

    # --- what calls do -----------------------------------------------------------------------------

    async def route(self, *, session: str | None, avoid: EngineName | None) -> Route:
        """A route for the next call, counted on it; waits for one. The caller gives the deadline."""
        while (route := self.routes.pick(session=session, avoid=avoid)) is None:
            await self._changed.wait()
        return route

    async def other_than(self, avoid: EngineName) -> None:
        """Return when a call could go to another engine than `avoid`. The caller gives the deadline."""
        while not self.routes.other_than(avoid):
            await self._changed.wait()

    def board(self, route: Route, flight: Flight) -> Boarded:
        """Have `flight` ended with its route."""
        self._flights.setdefault(route, set()).add(flight)
        return Boarded(route, route.version, route.moves, route.moving)

    def leave(self, route: Route, flight: Flight) -> None:
        """The attempt is over; its count on the route is given back."""
        self.routes.release(route)
        flights = self._flights[route]
        flights.discard(flight)
        if not flights:
            del self._flights[route]

    async def doubt(self, boarded: Boarded) -> str | None:
        """Why the version of what an attempt sampled is not certain; none where it is the route's.

        Certain is: every decision made before now has been read, and none of them touched the weights.
        """
        if self.routes.blind is None and not await self._caught_up():
            return "not every decision has been read"
        if self.routes.blind is not None:
            return self.routes.blind
        route = boarded.route
        if boarded.moving or route.moving or route.moves != boarded.moves:
            return f"weights of {route.key.engine}.{route.key.incarnation} were synced under way"
        return None

    async def _caught_up(self) -> bool:
        with anyio.move_on_after(CATCH_UP_S):
            target = await self._newest_decision()
            while target is not None and self._read_to < target:
                await self._changed.wait()
            return target is not None
        return False

    async def _newest_decision(self) -> "_Position | None":
        """Where the newest decision stands, by a reading that began after the call; none without the bus.

        A death breaks many attempts at once: they share one reading, or they would crowd the bus.
        """
        asked = self._readings
        async with self._one_reading:
            if self._newest.reading <= asked:
                self._readings = reading = self._readings + 1
                self._newest = _Newest(reading, await self._read_newest())
            return self._newest.position

    async def _read_newest(self) -> "_Position | None":
        try:
            newest = await self._job.tail(self._job.keys.decisions, count=1)
        except BusUnavailable:
            return None
        return _position(newest[-1].entry_id if newest else BEGINNING)

    def suspect(self, route: Route, error: str) -> None:
        """Pass `route` over until a decision names it, and tell the orchestrator."""
        if not self.routes.suspect(route):
            return
        self._after(SUSPICION_S, route, partial(self._trust_again, route))
        self._later(
            RouteSuspected(engine=route.key.engine, incarnation=route.key.incarnation, error=error[:300])
        )

    def _trust_again(self, route: Route) -> None:
        self._timers.pop(route, None)
        route.suspected = False
        self._wake()

    def abort(self, route: Route, request_ids: list[str]) -> None:
        """Have the engine forget requests whose connection may not tell it."""
        self._later(_Abort(route.address, request_ids))

    # --- said in the background ----------------------------------------------------------------------

    def _later(self, message: "RouteSuspected | _Abort") -> None:
        if self._tasks is None or self._saying >= BACKLOG:
            log.info("dropped: %s", message)
            return
        self._saying += 1
        self._tasks.start_soon(self._say, message)

    async def _say(self, message: "RouteSuspected | _Abort") -> None:
        try:
            with anyio.move_on_after(SAID_S):
                await (self._abort(message) if isinstance(message, _Abort) else self._hint(message))
        finally:
            self._saying -= 1

    async def _hint(self, hint: RouteSuspected) -> None:
        try:
            await self._job.hint(hint, source=self._source)
        except BusUnavailable as error:
            log.info("hint on %s.%d was not told: %s", hint.engine, hint.incarnation, error)

    async def _abort(self, abort: "_Abort") -> None:
        try:
            async with self._http.post(
                f"{abort.address}/abort_requests", json={"request_ids": abort.request_ids}
            ) as response:
                log.debug("abort of %s: status %d", abort.request_ids, response.status)
        except (aiohttp.ClientError, OSError) as error:
            log.info("abort of %s at %s was not told: %s", abort.request_ids, abort.address, error)


class _Abort(NamedTuple):
    address: str
    request_ids: list[str]
    """Never empty: an engine takes that for all of its requests."""


_Position = tuple[int, int]


class _Newest(NamedTuple):
    """The last reading of the newest decision."""

    reading: int
    position: _Position | None


def _position(entry_id: EntryId) -> _Position:
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)
