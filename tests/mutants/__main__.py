"""`python -m tests.mutants [--long] [--table] [NAME…]`: take each safeguard away and see that it is missed.

Each patch is applied to a copy. In the short form a seed that is known to find it is tried first; `--long`
hunts each from seed 0. Afterwards the product as it stands must pass the same seeds and states, or nothing
was found. Ends in one line of figures; 1 where a mutant lives on, 130 on Ctrl-C. `--table`: in Markdown.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.patches import PATCHES
from tests.mutants.trial import Hunted, hunt, passes
from tests.simulate.run import quiet

SHORT_S, LONG_S = 25.0, 900.0
"""For the hunt of one mutant in the simulation, and as long again in the search."""


def show(one: Hunted, *, table: bool) -> None:
    name, found = one.patch.name, one.found
    if found is None:
        print(f"{name:<58} LIVES {one.said}", flush=True)
        return
    rule = found.rule.splitlines()[0]
    how = f"{found.needed:,} {'seeds' if found.by == 'simulation' else 'states'}, hunted"
    if found.known:
        how = f"seed {found.seed}, known"
    where = (one.patch.aim or "all faults") if found.by == "simulation" else found.plan
    if table:
        print(f"| {name} | {found.by}: {where} | {how} | {rule.partition(':')[0]} |", flush=True)
    else:
        print(f"{name:<52} {found.by:<10} {how:>20}  {rule[:100]}", flush=True)


def figures(hunts: list[Hunted], wrong: int, seconds: float) -> str:
    founds = [one.found for one in hunts if one.found is not None]
    simulated = [found for found in founds if found.by == "simulation"]
    seeds = sorted(found.needed for found in simulated if not found.known)
    hunted = f"{len(seeds)} hunted"
    if seeds:
        hunted += f" ({seeds[len(seeds) // 2]} seeds in the median, {seeds[-1]} at most)"
    return (
        f"mutants: {len(founds)} of {len(hunts)} killed, {len(simulated)} by the simulation"
        f" ({len(simulated) - len(seeds)} by a known seed, {hunted}),"
        f" {len(founds) - len(simulated)} by the search; the product fails {wrong} of the same,"
        f" {seconds:.0f} s on {os.cpu_count()} cores"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names (default: every mutant)")
    parser.add_argument("--long", action="store_true", help="hunt each from seed 0, for longer")
    parser.add_argument("--table", action="store_true", help="print a table in Markdown")
    args = parser.parse_args()
    seconds = LONG_S if args.long else SHORT_S
    wanted = [patch for patch in PATCHES if not args.names or any(name in patch.name for name in args.names)]
    began = time.monotonic()
    hunts: list[Hunted] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        for one in threads.map(lambda patch: hunt(patch, seconds, knows=not args.long), wanted):
            hunts.append(one)
            show(one, table=args.table)
    killed = [one for one in hunts if one.found is not None]
    with multiprocessing.get_context("spawn").Pool(initializer=quiet) as pool:
        broken = pool.map(passes, killed, chunksize=1)
    for one, rule in zip(killed, broken, strict=True):
        if rule is not None:
            print(f"{one.patch.name}: the product as it stands breaks a rule there too: {rule}")
    wrong = sum(rule is not None for rule in broken)
    print(figures(hunts, wrong, time.monotonic() - began))
    return 0 if killed and len(killed) == len(hunts) and not wrong else 1


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
