"""The routes as they are followed on the bus, and the calls that are under way on them.

One task follows; calls wait for its events and never poll. A fence ends all calls of its incarnation at
once, or after its drain time.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial

import aiohttp
import anyio
from anyio.abc import TaskGroup

from relight.agents.replay.asides import Asides
from relight.agents.replay.certainty import Certainty
from relight.agents.replay.picks import spread_s
from relight.agents.replay.route import Boarded, Key, Route, Wanted
from relight.agents.replay.routes import Change, Freed, Moved, Routes, Spared
from relight.agents.replay.stream import Flight
from relight.agents.replay.turn import End
from relight.agents.replay.waiting import Queue
from relight.events.bus.follow import Away, Decided, Follower, Noted, Synced
from relight.events.bus.job import JobBus
from relight.events.errors import Undecodable
from relight.events.ids import Source

log = logging.getLogger(__name__)

SUSPICION_S = 30.0
"""A suspected route that no decision has named for that long is tried again: the orchestrator may be away,
or the failure may not have been the engine's. So is one that failed again after the orchestrator had found it
well: it is not reached from here."""

RETRY_S = 1.0


class Dispatch:
    """Routes, the flights on them, and whoever waits for a route. `run` keeps them up to date.

    `chance` draws a number in [0, 1), for everything that is done at random times.
    """

    def __init__(
        self,
        job: JobBus,
        http: aiohttp.ClientSession,
        *,
        source: Source,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.chance = chance
        self.routes = Routes()
        self.certainty = Certainty(job, self.routes)
        self.asides = Asides(job, http, source=source)
        self._job = job
        self._flights: dict[Route, set[Flight]] = {}
        self._queue = Queue(self.routes)
        self._changed = anyio.Event()
        self._synced = anyio.Event()
        self._timers: dict[Route, asyncio.TimerHandle] = {}

    async def synced(self) -> None:
        """Return when the state has been read once. The caller gives the deadline."""
        await self._synced.wait()

    async def run(self, tasks: TaskGroup) -> None:
        """Follow decisions, for ever."""
        self.asides.begin(tasks)
        follower = Follower(self._job)
        try:
            while True:
                await self._next(follower)
        finally:
            self.asides.end()
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
                self.certainty.advance(snapshot.tail)
                self._synced.set()
            case Decided(entry=entry, decision=decision):
                self._carry_out(self.routes.apply(decision))
                self.certainty.advance(entry.entry_id)
            case Noted(entry=entry):
                self.certainty.advance(entry.entry_id)
            case Away(reason=reason):
                self.routes.lose(reason)
                log.warning(
                    "job %s: %s; going on with %d held routes", self._job.name, reason, len(self.routes)
                )
                self.certainty.wake()
            case _:
                return
        self._wake()

    def _wake(self) -> None:
        self._queue.serve()
        self._changed.set()
        self._changed = anyio.Event()

    def _carry_out(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Freed(route=route, after_s=after_s):
                    if after_s > 0.0:
                        self._after(after_s, route, partial(self._free, change))
                    else:
                        self._free(change)
                case Spared(route=route):
                    if (timer := self._timers.pop(route, None)) is not None:
                        timer.cancel()
                case Moved(route=route, version=version):
                    for flight in tuple(self._flights.get(route, ())):
                        if flight.bound:
                            flight.cut(End.VERSION_MOVED, f"the weights moved to {version} under way")

    def _after(self, after_s: float, route: Route, do: Callable[[], None]) -> None:
        if (timer := self._timers.get(route)) is not None:
            timer.cancel()
        self._timers[route] = asyncio.get_running_loop().call_later(after_s, do)

    def _free(self, freed: Freed) -> None:
        route = freed.route
        if (timer := self._timers.pop(route, None)) is not None:
            timer.cancel()
        self.routes.forget(route)
        for flight in tuple(self._flights.get(route, ())):
            flight.cut(End.WITHDRAWN if freed.planned else End.FENCED, freed.why)

    # --- what calls do -----------------------------------------------------------------------------

    def route_now(self, wanted: Wanted) -> Route | None:
        """As `route`, where none has to be waited for."""
        return self.routes.pick(wanted)

    async def route(self, wanted: Wanted) -> Route:
        """A route for the next call, counted on it; waits for one. The caller gives the deadline."""
        return await self._queue.take(wanted)

    async def other_than(self, avoid: Key) -> None:
        """Return when a call could go to another engine than `avoid`. The caller gives the deadline."""
        while not self.routes.other_than(avoid):
            await self._changed.wait()

    def spread_s(self) -> float:
        """How long the next replay is put off, drawn anew each time."""
        return spread_s(len(self._queue) + self.routes.boarding, chance=self.chance())

    def board(self, route: Route, wanted: Wanted, flight: Flight) -> Boarded:
        """Have `flight` ended with its route."""
        self._flights.setdefault(route, set()).add(flight)
        return Boarded(route, wanted, route.version, route.moves, route.moving, wanted.replays)

    def seated(self, boarded: Boarded) -> None:
        """Its first token has come: another replay may follow."""
        boarded.route.doubts = 0
        if boarded.boarding:
            boarded.boarding = False
            boarded.route.boarding -= 1
            self._queue.serve()

    def leave(self, boarded: Boarded, flight: Flight) -> None:
        """The attempt is over; what it counts on the route is given back."""
        route = boarded.route
        self.routes.release(route, boarded.wanted, boarding=boarded.boarding)
        boarded.boarding = False
        flights = self._flights[route]
        flights.discard(flight)
        if not flights:
            del self._flights[route]
        self._queue.serve()

    def suspect(self, route: Route, error: str) -> None:
        """Pass `route` over until a decision names it, and tell the orchestrator."""
        if self.routes.suspect(route):
            self._after(SUSPICION_S, route, partial(self._trust_again, route))
            self.asides.suspect(route, error)

    def _trust_again(self, route: Route) -> None:
        self._timers.pop(route, None)
        route.suspected = False
        self._wake()
