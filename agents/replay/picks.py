"""Which route a call takes. Pure.

In this order: never one that is suspected; not the incarnation that has just failed the turn, and not its
engine, while there is another; a replay only where a place for replays is free; the session's own; the one
with the fewest calls under way. A turn that was in flight in two deaths takes an idle route, and others then
leave that route to it, where they have a choice: a third death is its own, and costs nobody else a thing.
"""

from collections import OrderedDict
from collections.abc import Sequence

from relight.agents.replay.route import Key, Route, Wanted

SESSIONS = 65_536
"""Sticky sessions remembered; the least recently used one is forgotten first."""

REPLAYS_AT_ONCE = 64
"""Replays of one client on their way to their first token at one route. Thousands that came back at once
would each bring a prefill; so many fill an engine's batch, and the next follows as a first token comes."""

SPREAD_S = 0.0001
"""A replay begins at random within that time for each other one that is under way: one alone at once, two
thousand within a fifth of a second, so that clients that hear of one route do not all call in one moment."""


def spread_s(replays: int, *, chance: float) -> float:
    """How long one of so many replays is put off; `chance` in [0, 1)."""
    return chance * SPREAD_S * max(0, replays - 1)


class Picks:
    """Sessions, and whose turn it is among equals."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Key] = OrderedDict()
        self._turn = 0

    def take(self, routed: Sequence[Route], wanted: Wanted) -> Route | None:
        """The route for the next call, counted on it; none where it has to wait."""
        usable = _allowed([route for route in routed if not route.suspected], wanted)
        if not usable:
            return None
        route = self._choose(usable, wanted)
        if wanted.session is not None:
            self._remember(wanted.session, route.key)
        route.in_flight += 1
        route.boarding += wanted.replays
        route.suspects += wanted.suspect
        return route

    def forget_sessions(self) -> int:
        """Each session chooses anew; how many had a route."""
        known = len(self._sessions)
        self._sessions.clear()
        return known

    def _choose(self, usable: list[Route], wanted: Wanted) -> Route:
        if wanted.suspect:
            return self._least(usable)
        usable = [route for route in usable if not route.quarantined] or usable
        key = self._sessions.get(wanted.session) if wanted.session is not None else None
        own = next((route for route in usable if route.key == key), None)
        return own or self._least(usable)

    def _least(self, usable: list[Route]) -> Route:
        # Equals are taken in turn, or the first of them would get every call of a slow stream of calls.
        self._turn += 1
        turn = self._turn % len(usable)
        return min(usable[turn:] + usable[:turn], key=lambda each: each.in_flight)

    def _remember(self, session: str, key: Key) -> None:
        self._sessions[session] = key
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)


def _allowed(usable: list[Route], wanted: Wanted) -> list[Route]:
    """Those that the call may take now: the other engines', else a later life's, else what there is."""
    avoid = wanted.avoid
    if avoid is not None:
        usable = [route for route in usable if route.key != avoid] or usable
    if wanted.replays:
        usable = [route for route in usable if route.boarding < REPLAYS_AT_ONCE]
    if avoid is not None:
        usable = [route for route in usable if route.key.engine != avoid.engine] or usable
    return usable
