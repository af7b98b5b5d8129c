"""Where calls may go: routes by engine and incarnation, from the state and the decisions after it. Pure.

Every change is compare-and-change by incarnation: what is said of an older one touches nothing newer. Epochs
below the highest one seen are ignored. A route that a client suspects is passed over until a decision names
it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from relight.agents.replay.picks import REPLAYS_AT_ONCE, Picks
from relight.agents.replay.route import ANY, Key, Route, Wanted
from relight.events.decisions import AnyDecision, LoadWeights, RouteAdded, RouteFenced, SyncWeights
from relight.events.ids import EngineName
from relight.events.schema import Meta, Snapshot
from relight.events.version import Version


class Freed(NamedTuple):
    """Calls on `route` are to end `after_s` from now; 0 is at once."""

    route: Route
    after_s: float
    why: str
    planned: bool = False
    """Nothing has died there."""


class Spared(NamedTuple):
    """A route that was to be freed stands again."""

    route: Route


class Moved(NamedTuple):
    """A route that stands is of another version now."""

    route: Route
    version: Version


Change = Freed | Spared | Moved


class Routes:
    """All routes of one job as this client knows them."""

    def __init__(self) -> None:
        self.epoch = 0
        self.blind: str | None = None
        """Why decisions may be missing at the moment."""
        self._routed: dict[EngineName, Route] = {}
        self._leaving: dict[Key, Route] = {}
        self._highest: dict[EngineName, int] = {}
        self._picks = Picks()

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routed.values())

    def __len__(self) -> int:
        return len(self._routed)

    # --- what the bus says -------------------------------------------------------------------------

    def read(self, snapshot: Snapshot, *, stamp: str) -> list[Change]:
        """Take the state in place of everything known. That of another server, of an older epoch or of no
        job says nothing: routes that are held stay, of no certain version until somebody names
        them, and a fresh reader has none.
        """
        self.blind = None
        meta = snapshot.meta
        if meta is None or meta.bus != stamp or snapshot.epoch < self.epoch:
            for route in self._all():
                route.moves += 1
                route.moving = True  # what it holds by now nobody has told
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
                route.moves += 1  # what was decided of it meanwhile is not known
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
        before = self._routed.get(key.engine)
        known = (before.key, before.address, before.version) if before is not None else None
        changes = self._stand(key, decision.address, decision.version)
        route = self._routed[key.engine]
        # It is well, and not reached from here: what is told once more changes nothing of that.
        stays = known == (key, decision.address, decision.version) and route.doubts > 1
        route.moving, route.suspected = False, route.suspected and stays
        return changes

    def _fence(self, key: Key, decision: RouteFenced) -> list[Change]:
        if decision.drain_s == 0.0 and (leaving := self._leaving.pop(key, None)) is not None:
            return [Freed(leaving, 0.0, decision.reason, decision.planned)]
        route = self._routed.get(key.engine)
        if route is None or route.key.incarnation > key.incarnation:
            return []
        return self._drop(route, decision.drain_s, decision.reason, planned=decision.planned)

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
            if route.version != version:
                changes.append(Moved(route, version))
            route.version, route.address = version, address
            route.moves += 1
        self._routed[key.engine] = route
        return changes

    def _move(self, key: Key) -> None:
        for route in self._all():
            if route.key == key:
                route.moving = True
                route.moves += 1

    def _drop(self, route: Route, drain_s: float, why: str, *, planned: bool = False) -> list[Change]:
        del self._routed[route.key.engine]
        if drain_s > 0.0:
            self._leaving[route.key] = route
        return [Freed(route, drain_s, why, planned)]

    def forget(self, route: Route) -> None:
        """A leaving route is gone for good."""
        if self._leaving.get(route.key) is route:
            del self._leaving[route.key]

    def _all(self) -> Iterator[Route]:
        yield from self._routed.values()
        yield from self._leaving.values()

    # --- what calls do -----------------------------------------------------------------------------

    def pick(self, wanted: Wanted = ANY) -> Route | None:
        """The route for the next call, counted on it; none where it has to wait."""
        return self._picks.take(list(self._routed.values()), wanted)

    def stands(self, route: Route) -> bool:
        """Whether calls may still be sent to it."""
        return self._routed.get(route.key.engine) is route

    def roomy(self, *, replays: bool) -> bool:
        """Whether some call could take a route now, a replay or any other."""
        return any(
            not route.suspected and (not replays or route.boarding < REPLAYS_AT_ONCE)
            for route in self._routed.values()
        )

    @property
    def boarding(self) -> int:
        """Replays whose first token has not come yet."""
        return sum(route.boarding for route in self._all())

    def other_than(self, avoid: Key) -> bool:
        """Whether a call could go elsewhere."""
        return any(
            route.key.engine != avoid.engine and not route.suspected for route in self._routed.values()
        )

    def suspect(self, route: Route) -> bool:
        """Pass `route` over until a decision names it; whether that is new."""
        new = not route.suspected and self._routed.get(route.key.engine) is route
        route.suspected = True
        route.doubts += new
        return new

    def release(self, route: Route, wanted: Wanted = ANY, *, boarding: bool = False) -> None:
        """A call on `route` has ended; `boarding`: a replay whose first token never came."""
        route.in_flight -= 1
        route.suspects -= wanted.suspect
        route.boarding -= boarding


def _syncing(meta: Meta, key: Key) -> bool:
    members = meta.sync.order.members if meta.sync is not None else ()
    return any((member.engine, member.incarnation) == key for member in members)
