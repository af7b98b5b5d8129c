"""Where calls may go: routes by engine and incarnation, from the state and the decisions after it. Pure.

Every change is compare-and-change by incarnation: what is said of an older one touches nothing newer, and a
call counts on the route object it was given, so that a late release cannot touch a replacement. Epochs below
the highest one seen are ignored. A route that a client suspects is passed over until a decision names it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from relight.events.decisions import AnyDecision, LoadWeights, RouteAdded, RouteFenced, SyncWeights
from relight.events.ids import EngineName
from relight.events.schema import Meta, Snapshot
from relight.events.version import Version

SESSIONS = 65_536
"""Sticky sessions remembered; the least recently used one is forgotten first."""


class Key(NamedTuple):
    engine: EngineName
    incarnation: int


class Route:
    """One incarnation that calls may be sent to, with what is under way there."""

    __slots__ = ("address", "in_flight", "key", "moves", "moving", "suspected", "version")

    def __init__(self, key: Key, address: str, version: Version) -> None:
        self.key = key
        self.address = address
        self.version = version
        self.in_flight = 0
        self.suspected = False
        self.moving = False
        """A sync or load that names it is under way: what it samples now is of no certain version."""
        self.moves = 0
        """Counts everything that may have changed its weights."""

    def __repr__(self) -> str:
        return f"Route({self.key.engine}.{self.key.incarnation} {self.address} {self.version})"


class Freed(NamedTuple):
    """Calls on `route` are to end `after_s` from now; 0 is at once."""

    route: Route
    after_s: float
    why: str


class Spared(NamedTuple):
    """A route that was to be freed stands again."""

    route: Route


Change = Freed | Spared


class Routes:
    """All routes of one job as this client knows them."""

    def __init__(self) -> None:
        self.epoch = 0
        self.blind: str | None = None
        """Why decisions may be missing at the moment."""
        self._routed: dict[EngineName, Route] = {}
        self._leaving: dict[Key, Route] = {}
        self._highest: dict[EngineName, int] = {}
        self._sessions: OrderedDict[str, Key] = OrderedDict()
        self._turn = 0

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routed.values())

    def __len__(self) -> int:
        return len(self._routed)

    # --- what the bus says -------------------------------------------------------------------------

    def read(self, snapshot: Snapshot, *, stamp: str) -> list[Change]:
        """Take the state in place of everything known. That of another server, of an older epoch or of no
        job says nothing: routes that are held stay, and a fresh reader has none.
        """
        self.blind = None
        meta = snapshot.meta
        if meta is None or meta.bus != stamp or snapshot.epoch < self.epoch:
            for route in self._all():
                route.moves += 1
            return []
        self.epoch = snapshot.epoch
        changes: list[Change] = []
        routed = {
            Key(name, state.incarnation): state.route
            for name, state in snapshot.engines.items()
            if state.route is not None
        }
        for route in list(self._routed.values()):
            if route.key not in routed:
                changes += self._drop(route, 0.0, "the state routes it no more")
        for route in self._leaving.values():
            route.moves += 1
        for key, there in routed.items():
            changes += self._stand(key, there.address, there.version)
            route = self._routed[key.engine]
            route.moving = _syncing(meta, key) or isinstance(snapshot.engines[key.engine].intent, LoadWeights)
            route.suspected = False
        return changes

    def lose(self, why: str) -> None:
        """The bus is away: what is held is used on, but nothing about it is certain."""
        self.blind = why

    def apply(self, decision: AnyDecision) -> list[Change]:
        """Take one decision."""
        if decision.epoch < self.epoch or decision.dry_run:
            return []
        self.epoch = decision.epoch
        match decision:
            case RouteAdded(engine=engine, incarnation=incarnation):
                return self._add(Key(engine, incarnation), decision)
            case RouteFenced(engine=engine, incarnation=incarnation):
                self._highest[engine] = max(incarnation, self._highest.get(engine, 0))
                return self._fence(Key(engine, incarnation), decision)
            case SyncWeights(members=members):
                for member in members:
                    self._move(Key(member.engine, member.incarnation))
            case LoadWeights(engine=engine, incarnation=incarnation):
                self._move(Key(engine, incarnation))
            case _:
                pass
        return []

    def _add(self, key: Key, decision: RouteAdded) -> list[Change]:
        if key.incarnation < self._highest.get(key.engine, 0):
            return []
        changes = self._stand(key, decision.address, decision.version)
        route = self._routed[key.engine]
        route.moving = route.suspected = False
        return changes

    def _fence(self, key: Key, decision: RouteFenced) -> list[Change]:
        if decision.drain_s == 0.0 and (leaving := self._leaving.pop(key, None)) is not None:
            return [Freed(leaving, 0.0, decision.reason)]
        route = self._routed.get(key.engine)
        if route is None or route.key.incarnation > key.incarnation:
            return []
        return self._drop(route, decision.drain_s, decision.reason)

    def _stand(self, key: Key, address: str, version: Version) -> list[Change]:
        """Have `key` routed, and nothing else at its engine or address."""
        self._highest[key.engine] = max(key.incarnation, self._highest.get(key.engine, 0))
        changes: list[Change] = []
        for other in list(self._routed.values()):
            if other.key != key and (other.key.engine == key.engine or other.address == address):
                changes += self._drop(other, 0.0, f"{key.engine}.{key.incarnation} is routed in its place")
        route = self._routed.get(key.engine)
        if route is None:
            route = self._leaving.pop(key, None)
            if route is not None:
                changes.append(Spared(route))
        if route is None:
            route = Route(key, address, version)
        if (route.version, route.address) != (version, address):
            route.version, route.address = version, address
            route.moves += 1
        self._routed[key.engine] = route
        return changes

    def _move(self, key: Key) -> None:
        for route in self._all():
            if route.key == key:
                route.moving = True
                route.moves += 1

    def _drop(self, route: Route, drain_s: float, why: str) -> list[Change]:
        del self._routed[route.key.engine]
        if drain_s > 0.0:
            self._leaving[route.key] = route
        return [Freed(route, drain_s, why)]

    def forget(self, route: Route) -> None:
        """A leaving route is gone for good."""
        if self._leaving.get(route.key) is route:
            del self._leaving[route.key]

    def _all(self) -> Iterator[Route]:
        yield from self._routed.values()
        yield from self._leaving.values()

    # --- what calls do -----------------------------------------------------------------------------

    def pick(self, *, session: str | None = None, avoid: EngineName | None = None) -> Route | None:
        """The route for the next call, counted on it: the session's own, else the one with the fewest under
        way. `avoid` is taken only where there is no other.
        """
        usable = [route for route in self._routed.values() if not route.suspected]
        usable = [route for route in usable if route.key.engine != avoid] or usable
        if not usable:
            return None
        route = self._of_session(session, usable) if session is not None else None
        if route is None:
            # Equals are taken in turn, or the first of them would get every call of a slow stream of calls.
            self._turn += 1
            turn = self._turn % len(usable)
            route = min(usable[turn:] + usable[:turn], key=lambda each: each.in_flight)
        if session is not None:
            self._sessions[session] = route.key
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        route.in_flight += 1
        return route

    def _of_session(self, session: str, usable: list[Route]) -> Route | None:
        key = self._sessions.get(session)
        return next((route for route in usable if route.key == key), None)

    def other_than(self, avoid: EngineName) -> bool:
        """Whether a call could go elsewhere."""
        return any(route.key.engine != avoid and not route.suspected for route in self._routed.values())

    def suspect(self, route: Route) -> bool:
        """Pass `route` over until a decision names it; whether that is new."""
        new = not route.suspected and self._routed.get(route.key.engine) is route
        route.suspected = True
        return new

    def release(self, route: Route) -> None:
        """A call on `route` has ended."""
        route.in_flight -= 1


def _syncing(meta: Meta, key: Key) -> bool:
    members = meta.sync.order.members if meta.sync is not None else ()
    return any((member.engine, member.incarnation) == key for member in members)
