"""`python -m tests.mutants.hunt PLAN SECONDS`: look for a broken rule in whatever `relight` is imported.

First the simulation, seed by seed; then the search, plan by plan. Prints one JSON object.
"""

import json
import sys
import time
from itertools import count

from tests.search.plans import ONE, TWO
from tests.search.search import Search
from tests.simulate.plan import swarm
from tests.simulate.run import run

STATES = 2_000_000


def simulated(until_s: float) -> dict[str, object] | None:
    """The first seed that breaks a rule; None where time ran out."""
    for seed in count(1):
        if time.monotonic() > until_s:
            return None
        result = run(swarm(seed))
        if result.broken is not None:
            return {"by": "simulation", "needed": seed, "unit": "seeds", "rule": result.broken}
    return None


def searched(first: str, until_s: float) -> dict[str, object] | None:
    """The first plan of the search that breaks a rule; plans that begin with `first` go first."""
    plans = sorted((*ONE, *TWO), key=lambda plan: not (first and plan.name.startswith(first)))
    for left, plan in zip(range(len(plans), 0, -1), plans, strict=True):
        seconds = (until_s - time.monotonic()) / left
        if seconds <= 0:
            return None
        found = Search(plan).run(states=STATES, seconds=seconds, tail_every=3)
        if found.broken is not None:
            return {"by": "search", "needed": found.states, "unit": "states", "rule": found.broken}
    return None


def main() -> int:
    plan, seconds = sys.argv[1], float(sys.argv[2])
    began = time.monotonic()
    found = simulated(began + seconds) or searched(plan, began + 3 * seconds)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
