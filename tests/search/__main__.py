"""Search every plan and print what was found, and one line of figures; 1 where a rule is broken."""

import argparse

from tests.search.plans import ONE, OVER_TWO_NODES, TWO
from tests.search.search import Found, Search
from tests.search.world import Plan

SHORT_S = 18.0
"""For each plan of the short form."""
LONG_S = 1800.0
MOST_STATES = 4_000_000
"""Of one plan: about a kilobyte each."""


def show(found: Found) -> None:
    how = "all of it" if found.complete else "cut short"
    print(
        f"{found.plan:<32} {found.states:>9,} states  depth {found.depth:>3}  {how:<9}  "
        f"{found.transitions / found.seconds:>7,.0f} transitions/s  {found.tails:>9,} tails, "
        f"the longest {found.longest_tail}, {found.tails - found.served} not all served",
        flush=True,
    )
    if found.broken is not None:
        print(f"\n{found.broken}\n\n" + "\n".join(found.trace) + "\n", flush=True)


def search(plan: Plan, seconds: float, tail_every: int) -> Found:
    """One plan's search, in memory that is given back."""
    return Search(plan).run(states=MOST_STATES, seconds=seconds, tail_every=tail_every)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.search", description=__doc__)
    parser.add_argument(
        "--long", action="store_true", help="half an hour for each plan, a tail from each state"
    )
    parser.add_argument("--plan", help="only those with this in their name")
    args = parser.parse_args()
    plans = [plan for plan in (*ONE, *TWO, *OVER_TWO_NODES) if (args.plan or "") in plan.name]
    if not plans:
        parser.error(f"no plan has {args.plan!r} in its name")
    founds: list[Found] = []
    for plan in plans:
        found = search(plan, LONG_S if args.long else SHORT_S, 1 if args.long else 3)
        founds.append(found)
        show(found)
    states, transitions = sum(each.states for each in founds), sum(each.transitions for each in founds)
    seconds, broken = sum(each.seconds for each in founds), [each for each in founds if each.broken]
    unsettled = [each for each in founds if not each.served]
    depth = max(each.depth for each in founds)
    print(
        f"search: {states:,} states, {transitions:,} transitions, depth {depth}, "
        f"{transitions / seconds:,.0f} transitions/s, {sum(each.tails for each in founds):,} tails settled, "
        f"{len(broken)} rules broken"
    )
    return 1 if broken or unsettled else 0


if __name__ == "__main__":
    raise SystemExit(main())
