"""`python -m tests.mutants.hunt QUARRY`: look for a broken rule in whatever `relight` is imported.

A seed that is known first, if one is named, then the simulation from seed 0 on, then the search, plan by
plan. Prints one JSON object.
"""

import sys
import time
from itertools import count

import msgspec

from tests.mutants.aims import aimed
from tests.search.plans import ONE, TWO
from tests.search.search import Search
from tests.simulate.run import run

STATES = 2_000_000
TAIL_EVERY = 3


class Quarry(msgspec.Struct, frozen=True):
    """What is looked for, and for how long in each of the two."""

    aim: str
    seed: int | None
    seconds: float


class Found(msgspec.Struct, frozen=True):
    """How a broken rule was found."""

    by: str
    """`simulation` or `search`."""
    needed: int
    """Seeds that were run, or states that were seen."""
    rule: str
    seed: int = -1
    known: bool = False
    """The seed was named beforehand."""
    plan: str = ""
    """Of the search."""


def known(quarry: Quarry) -> Found | None:
    """Whether the seed that is named breaks a rule still."""
    if quarry.seed is None:
        return None
    broken = run(aimed(quarry.aim, quarry.seed)).broken
    return Found("simulation", 1, broken, quarry.seed, known=True) if broken is not None else None


def simulated(quarry: Quarry) -> Found | None:
    """The first seed that breaks a rule; none where time ran out."""
    until_s = time.monotonic() + quarry.seconds
    for seed in count():
        if time.monotonic() > until_s:
            return None
        broken = run(aimed(quarry.aim, seed)).broken
        if broken is not None:
            return Found("simulation", seed + 1, broken, seed)
    return None


def searched(quarry: Quarry) -> Found | None:
    """The first plan of the search that breaks a rule."""
    until_s = time.monotonic() + quarry.seconds
    plans = (*ONE, *TWO)
    for left, plan in zip(range(len(plans), 0, -1), plans, strict=True):
        seconds = (until_s - time.monotonic()) / left
        if seconds <= 0:
            return None
        found = Search(plan).run(states=STATES, seconds=seconds, tail_every=TAIL_EVERY)
        if found.broken is not None:
            return Found("search", found.states, found.broken, plan=plan.name)
    return None


def hunted(quarry: Quarry) -> Found | None:
    """By whichever finds it first."""
    return known(quarry) or simulated(quarry) or searched(quarry)


def main() -> int:
    quarry = msgspec.json.decode(sys.argv[1], type=Quarry)
    print(msgspec.json.encode(hunted(quarry)).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
