"""Calls that wait for a route: first calls and replays each in the order of their coming.

Replays wait for room too, and first calls not for them. A route is given to a waiting call, not announced to
all of them: of two thousand that wait for one place, one wakes. Nobody is given a route and lost: a call that
is cancelled in the same moment gives it back.
"""

import anyio

from relight.agents.replay.route import Route, Wanted
from relight.agents.replay.routes import Routes


class _Waiter:
    """One call that waits."""

    __slots__ = ("given", "route", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.given = anyio.Event()
        self.route: Route | None = None


class Queue:
    """Used by the tasks of one event loop."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._first: dict[_Waiter, None] = {}
        self._replays: dict[_Waiter, None] = {}

    def __len__(self) -> int:
        return len(self._first) + len(self._replays)

    async def take(self, wanted: Wanted) -> Route:
        """A route, counted on it. The caller gives the deadline."""
        route = self._routes.pick(wanted)
        while route is None:
            given = await self._given(wanted)
            if self._routes.stands(given):
                route = given
            else:  # it was fenced before its taker could run
                self._give_back(given, wanted)
                route = self._routes.pick(wanted)
        return route

    async def _given(self, wanted: Wanted) -> Route:
        waiter = _Waiter(wanted)
        waiting = self._replays if wanted.replays else self._first
        waiting[waiter] = None
        taken = False
        try:
            await waiter.given.wait()
            taken = True
        finally:
            waiting.pop(waiter, None)
            if not taken and waiter.route is not None:
                self._give_back(waiter.route, wanted)
                self.serve()
        assert waiter.route is not None, "given is set with a route"
        return waiter.route

    def _give_back(self, route: Route, wanted: Wanted) -> None:
        self._routes.release(route, wanted, boarding=wanted.replays)

    def serve(self) -> None:
        """Give out what there is; to be called whenever a route came, or room on one."""
        for waiting, replays in ((self._first, False), (self._replays, True)):
            for waiter in list(waiting):
                if not self._routes.roomy(replays=replays):
                    break
                if (route := self._routes.pick(waiter.wanted)) is not None:
                    waiter.route = route
                    waiter.given.set()
                    del waiting[waiter]
