"""The whole world as one small tuple, and what is searched in it."""

from typing import Any, NamedTuple

from relight.orchestrator.settings import Settings
from tests.search.mind import Outcome

Words = tuple[int, ...]
BORN = -1
"""Among decisions: the bus is another one than before."""


class Plan(NamedTuple):
    """What is searched."""

    name: str
    faults: int
    """How many may happen in one history."""
    kinds: frozenset[str]
    settings: Settings = Settings(restarts=2)
    pushes: bool = False
    parts: bool = False
    """One engine over both nodes, its head at a, instead of an engine on each."""
    warm: bool = True
    """Begin where both engines serve; else where nothing was ever started."""


class World(NamedTuple):
    """Numbers of values in the pools of `Search`; 0 is none."""

    job: int
    deciding: bool
    held: tuple[str, int, Outcome] | None
    """A commit whose reply was lost (`lost`), or that a frozen orchestrator will yet try (`old`)."""
    facts: Words
    decisions: tuple[Words, Words, Words]
    agents: tuple[int, int]
    trainer: int
    doubled: int
    """A fact that will be read once more."""
    late: tuple[int, Words] | None
    """A source whose appends wait, and what waits."""
    replica: tuple[int, Words] | None
    """What a lagging replica holds: the bus will be rolled back to it."""
    stamp: int
    top: int
    """The highest epoch ever issued."""
    faults: int


Happening = tuple[Any, ...]
Next = tuple[Happening, World]


class Broken(Exception):
    """A rule does not hold in the state that a step leads to."""

    def __init__(self, rule: str, world: World) -> None:
        super().__init__(rule)
        self.rule = rule
        self.world = world


def told(world: World, receiver: int, words: Words) -> World:
    """The world with `words` waiting for that receiver."""
    decisions = tuple(words if index == receiver else each for index, each in enumerate(world.decisions))
    return world._replace(decisions=decisions)  # type: ignore[arg-type]
