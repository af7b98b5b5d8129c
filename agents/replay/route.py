"""One route, what a call wants of the one that it takes, and the call on it. Pure values and counters."""

from dataclasses import dataclass
from typing import NamedTuple

from relight.events.ids import EngineName
from relight.events.version import Version


class Key(NamedTuple):
    engine: EngineName
    incarnation: int


class Route:
    """One incarnation that calls may be sent to, with what is under way there.

    A call counts on the object that it was given, so that a late release cannot touch a replacement.
    """

    __slots__ = (
        "address",
        "boarding",
        "doubts",
        "in_flight",
        "key",
        "moves",
        "moving",
        "suspected",
        "suspects",
        "version",
    )

    def __init__(self, key: Key, address: str, version: Version) -> None:
        self.key = key
        self.address = address
        self.version = version
        self.in_flight = 0
        self.boarding = 0
        """Replays among them whose first token has not come yet."""
        self.suspects = 0
        """Turns among them that were in flight in two deaths."""
        self.suspected = False
        """A client saw it fail, and no decision has named it since."""
        self.doubts = 0
        """Suspicions in a row, without a token in between."""
        self.moving = False
        """A sync or load that names it is under way: what it samples now is of no certain version."""
        self.moves = 0
        """Counts everything that may have changed its weights."""

    @property
    def quarantined(self) -> bool:
        """Only suspects are under way on it."""
        return 0 < self.suspects == self.in_flight

    def __repr__(self) -> str:
        return f"Route({self.key.engine}.{self.key.incarnation} {self.address} {self.version})"


class Wanted(NamedTuple):
    """What a call asks of its route."""

    session: str | None = None
    """Calls of one session stay on one incarnation while it serves."""
    avoid: Key | None = None
    """The incarnation that has just failed this turn: taken only where there is no other."""
    replays: bool = False
    """An attempt after the first: it takes one of the few places for replays."""
    suspect: bool = False
    """The turn was in flight in two deaths: it runs alone where there is a choice."""


ANY = Wanted()


@dataclass(slots=True)
class Boarded:
    """A call on its route, and what was known of the route when it began."""

    route: Route
    wanted: Wanted
    version: Version
    moves: int
    moving: bool
    boarding: bool
    """It takes one of the places for replays, until its first token comes."""
