"""`python -m tests.simulate [--seeds N] [--first SEED] [--long]`: many seeds; `--seed SEED [--trace]`: one.

Ends in one line of figures. Exits 1 where a rule is broken, a kind of fault never happened, or the speed is
under its bar; 130 on Ctrl-C.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.simulate.plan import KINDS, SPEED, swarm
from tests.simulate.run import Result, quiet, run, run_seed

SHORT, LONG = 600, 100_000
"""Seeds: about two minutes on two cores, and some hours."""
LEAST_SPEED = 2000.0
"""Simulated seconds per second of one core, all checks on, of the plan `SPEED`."""
SHOWN = 5
"""Broken seeds that are printed; the others are counted."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, help=f"how many (default {SHORT})")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print who said and decided what, and when")
    parser.add_argument("--long", action="store_true", help=f"{LONG:,} seeds")
    args = parser.parse_args()
    if args.seed is not None:
        return _one(args.seed, traced=args.trace)
    count = args.seeds or (LONG if args.long else SHORT)
    return _many(range(args.first, args.first + count))


def _one(seed: int, *, traced: bool) -> int:
    plan = swarm(seed)
    result = run(plan, traced=traced)
    print("\n".join((*result.lines, str(plan))))
    print(
        f"seed {seed}: {result.broken or 'no rule broken'}; {result.virtual_s:,.1f} simulated s, "
        f"{result.events:,} events, hash {result.digest}"
    )
    return 1 if result.broken else 0


def _many(seeds: range) -> int:
    speed = measured_speed()
    began = time.monotonic()
    total, broken = _Total(), 0
    with multiprocessing.get_context("spawn").Pool(initializer=quiet) as pool:
        for result in _each(pool.imap_unordered(run_seed, seeds, chunksize=4)):
            total.add(result)
            if result.broken:
                broken += 1
                if broken <= SHOWN:
                    _show(result)
    for kind, what in KINDS.items():
        print(f"{kind:<14} {total.faults[kind]:>9,}  {what}")
    never = [kind for kind in KINDS if not total.faults[kind]]
    if never:
        print(f"never happened: {', '.join(never)}")
    if speed < LEAST_SPEED:
        print(f"the speed of {speed:,.0f} is under {LEAST_SPEED:,.0f} simulated seconds per second of a core")
    cpus = os.cpu_count() or 1
    print(
        f"simulate: {len(seeds):,} seeds, {total.virtual_s / 3600.0:,.1f} simulated hours, "
        f"{speed:,.0f} simulated s/s a core at the speed plan ({total.virtual_s / total.cpu_s:,.0f} here), "
        f"{total.events / total.cpu_s:,.0f} events/s, {total.turns:,} turns judged, "
        f"{sum(total.faults[kind] for kind in KINDS):,} faults of {len(KINDS) - len(never)} kinds, "
        f"{broken} seeds with a rule broken, {time.monotonic() - began:,.0f} s on {cpus} cores"
    )
    return 1 if broken or never or speed < LEAST_SPEED else 0


def measured_speed() -> float:
    """Simulated seconds per second of one core's time, the best of three: others may use the core too."""
    runs = [run(SPEED, settles=False) for _ in range(3)]
    return max(each.virtual_s / each.cpu_s for each in runs)


class _Total:
    def __init__(self) -> None:
        self.virtual_s = self.cpu_s = 0.0
        self.events = self.turns = 0
        self.faults: Counter[str] = Counter()

    def add(self, result: Result) -> None:
        self.virtual_s += result.virtual_s
        self.cpu_s += result.cpu_s
        self.events += result.events
        self.turns += result.turns
        self.faults.update(result.faults)


def _each(results: Iterable[Result]) -> Iterable[Result]:
    for done, result in enumerate(results, start=1):
        yield result
        if done % 1000 == 0:
            print(f"{done:,} seeds", file=sys.stderr, flush=True)


def _show(result: Result) -> None:
    traced = run(swarm(result.seed), traced=True)
    print("\n".join((f"\nseed {result.seed}: {result.broken}", *traced.lines[-80:], "")), flush=True)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
