"""`python -m tests.crash_points [--long]`: visit every point and print what came of it; 1 where a rule broke.

First a recovery without deaths tells the points; then each is visited, and after each what follows tells the
second points. The short form takes some of these pairs by a seed, the long one all. `--case NAME` visits one.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from relight.orchestrator.cli.running import interrupted_by_sigterm
from tests.crash_points.lanes import visit_all
from tests.crash_points.layout import Recovery
from tests.crash_points.points import Case, Point, apart, case_of, in_order
from tests.crash_points.visit import Visit

RECORDINGS = 2
PAIRS = 100
"""Of the short form, as many of them as fit."""
SHORT_S = 270.0
"""No pair of the short form is begun after this."""
CLOCKED = ("look", "beat", "forget")
"""Effects that the clock decides on: only the first one is a point that comes again."""


class Tally:
    """What was visited and what came of it."""

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self.began_s = time.monotonic()

    def __call__(self, found: Visit, folder: Path) -> None:
        self.visits.append(found)
        if found.broken:
            print(f"BROKEN {found.name or 'no death'!r}; everything is kept in {folder}")
            print("".join(f"  {text}\n" for text in found.broken), end="", flush=True)
        if len(self.visits) % 20 == 0:
            print(f"  {len(self.visits)} cases, {time.monotonic() - self.began_s:.0f} s", flush=True)

    @property
    def missed(self) -> list[Case]:
        """Cases whose points were not passed, and no rule was broken."""
        return [each.case for each in self.visits if not each.reached and not each.broken]


def points_of(visits: Sequence[Visit]) -> list[Point]:
    """Every point of a recovery, in order."""
    passes = [each for found in visits for each in found.passes]
    points = in_order((p for found in visits for p in apart(found.passes)), passes)
    return [point for point in points if point.what not in CLOCKED or point.nth == 1]


def pairs_of(visits: Sequence[Visit]) -> list[Case]:
    """Each first point with each one that was passed after the death there."""
    pairs: list[Case] = []
    for found in visits:
        if found.reached and len(found.case) == 1:
            after = [each for each in found.passes if each.deaths == 1]
            points = (p for p in in_order(apart(after), after) if p.what not in CLOCKED or p.nth == 1)
            pairs += [(*found.case, point) for point in points]
    return pairs


async def run(*, long: bool, seed: int, recover_at: Recovery) -> int:
    recorded = Tally()
    await visit_all([()] * RECORDINGS, recorded, recover_at=recover_at, lanes=1)
    points = points_of(recorded.visits)
    count = {role: sum(point.role == role for point in points) for role in ("orchestrator", "agent")}
    print(f"{count['orchestrator']} points of the orchestrator, {count['agent']} of the agent", flush=True)
    singles = Tally()
    await visit_all([(point,) for point in points], singles, recover_at=recover_at)
    again = Tally()
    await visit_all(singles.missed, again, recover_at=recover_at)
    possible = pairs_of([*singles.visits, *again.visits])
    chosen = possible if long else random.Random(seed).sample(possible, min(PAIRS, len(possible)))
    print(f"{len(possible)} pairs; {len(chosen)} by seed {seed}, if time allows", flush=True)
    pairs = Tally()
    until_s = math.inf if long else recorded.began_s + SHORT_S
    await visit_all(chosen, pairs, recover_at=recover_at, until_s=until_s)
    visits = [*recorded.visits, *singles.visits, *again.visits, *pairs.visits]
    broken = [text for found in visits for text in found.broken]
    for case in again.missed:
        print(f"not passed: {case[0]}")
    print(
        f"crash points: {count['orchestrator']} of the orchestrator, {count['agent']} of the agent, "
        f"{len(visits)} cases, {len(pairs.visits) - len(pairs.missed)} pairs of {len(possible)}, "
        f"seed {seed}, {len(again.missed)} points and {len(pairs.missed)} pairs not passed, "
        f"{time.monotonic() - recorded.began_s:.0f} s, {len(broken)} rules broken"
    )
    return 1 if broken or len(again.missed) > len(points) // 20 else 0


async def run_one(case: Case, *, recover_at: Recovery) -> int:
    tally = Tally()
    await visit_all([case], tally, recover_at=recover_at)
    (found,) = tally.visits[:1]
    for each in found.passes:
        print(f"{each.pid} {each.point}{'  DIES' if each.dies else ''}")
    print(f"{found.name!r}: {'passed' if found.reached else 'NOT PASSED'}, {len(found.broken)} rules broken")
    return 1 if found.broken or not found.reached else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_points")
    parser.add_argument("--long", action="store_true", help="all pairs")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--recover-at", choices=("boundary", "snapshot"), default="boundary")
    parser.add_argument("--case", help="one case by its name, as it was printed")
    args = parser.parse_args()
    interrupted_by_sigterm()
    try:
        if args.case is not None:
            return anyio.run(lambda: run_one(case_of(args.case), recover_at=args.recover_at))
        return anyio.run(lambda: run(long=args.long, seed=args.seed, recover_at=args.recover_at))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
