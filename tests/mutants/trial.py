"""One mutant's trial: it is hunted in a process of its own, and the product is run where it was found."""

import os
import subprocess
import sys
from typing import NamedTuple

import msgspec

from tests.mutants.aims import aimed
from tests.mutants.copies import mutated
from tests.mutants.hunt import STATES, TAIL_EVERY, Found, Quarry
from tests.mutants.patch import Patch
from tests.search.plans import ONE, TWO
from tests.search.search import Search
from tests.simulate.run import run

SEARCH_S = 900.0
"""For the product, in as many states as the mutant needed."""


class Hunted(NamedTuple):
    patch: Patch
    found: Found | None
    said: str = ""


def hunt(patch: Patch, seconds: float, *, knows: bool = True) -> Hunted:
    """Look for what the mutant breaks, in a process of its own. `knows`: the seed that is named."""
    quarry = Quarry(patch.aim, patch.seed if knows else None, seconds)
    with mutated(patch) as copy:
        done = subprocess.run(
            [sys.executable, "-m", "tests.mutants.hunt", msgspec.json.encode(quarry).decode()],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(copy / "src"), str(copy)))},
            capture_output=True,
            text=True,
            timeout=4 * seconds + 120.0,
            check=False,
        )
    if done.returncode:
        return Hunted(patch, None, done.stderr[-2000:])
    return Hunted(patch, msgspec.json.decode(done.stdout.splitlines()[-1], type=Found | None))


def passes(one: Hunted) -> str | None:
    """What the product as it stands breaks where the mutant was found; none where it is nothing."""
    assert one.found is not None
    if one.found.by == "simulation":
        return run(aimed(one.patch.aim, one.found.seed)).broken
    plan = next(each for each in (*ONE, *TWO) if each.name == one.found.plan)
    states = min(STATES, one.found.needed + 1)
    return Search(plan).run(states=states, seconds=SEARCH_S, tail_every=TAIL_EVERY).broken
