"""Which servers verl's calls may go to: the job's routes, less what verl itself has taken out. Pure.

A server's id is `ENGINE.INCARNATION`, so what verl says of it late is about that incarnation alone. verl's
own ids, `HOST:PORT`, are understood as the server that is routed there.
"""

from collections.abc import Callable

from relight.agents.replay.route import ANY, Key, Route, Wanted
from relight.agents.replay.routes import Routes
from relight.events.ids import EngineName


class Pool(Routes):
    """Routes of engines that `ours` says are known here."""

    def __init__(self, ours: Callable[[EngineName], bool]) -> None:
        super().__init__()
        self._ours = ours
        self._out: set[Key] = set()
        self._held: dict[str, Route] = {}
        """Servers that calls were given, by id, for as long as such calls are under way."""

    @property
    def servers(self) -> dict[str, Route]:
        """Those that calls may be sent to, by id."""
        return {server_id(each.key): each for each in self if self._fits(each)}

    def _fits(self, route: Route) -> bool:
        return route.key not in self._out and self._ours(route.key.engine)

    def pick(self, wanted: Wanted = ANY) -> Route | None:
        route = self._picks.take(list(self.servers.values()), wanted)
        if route is not None:
            self._held[server_id(route.key)] = route
        return route

    def stands(self, route: Route) -> bool:
        return super().stands(route) and self._fits(route)

    def roomy(self, *, replays: bool) -> bool:
        return bool(self.servers)

    def done(self, name: str) -> None:
        """A call on the server of this id has ended. Of an id that is not known nothing is counted."""
        route = self._held.get(name)
        if route is None or route.in_flight == 0:
            return
        self.release(route)
        if route.in_flight == 0:
            del self._held[name]

    def take_out(self, name: str) -> bool:
        """Give no call to the incarnation of this id any more; whether there is such a server."""
        route = self._named(name)
        if route is None:
            return False
        self._out.add(route.key)
        return True

    def put_back(self, engine: EngineName) -> None:
        """Whatever was taken out of this engine may be given calls again."""
        self._out = {key for key in self._out if key.engine != engine}

    def _named(self, name: str) -> Route | None:
        for route in self:
            if name in (server_id(route.key), route.address.partition("//")[2]):
                return route
        return None

    def unstick(self) -> int:
        """Have each session choose its server anew; how many had one."""
        return self._picks.forget_sessions()


def server_id(key: Key) -> str:
    return f"{key.engine}.{key.incarnation}"
