"""`python -m tests.ray_faults [--short] [--case NAME]…`: faults and outcomes; 1 where one fell short."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from relight.orchestrator.cli.running import interrupted_by_sigterm
from tests.ray_faults import cases
from tests.ray_faults.cases import Group
from tests.ray_faults.run import Outcome, run, with_a_program_that_no_node_has, without_room
from tests.ray_faults.world import standing

Tell = Callable[[str], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ray_faults")
    parser.add_argument("--short", action="store_true", help="a few cases, for the tests")
    parser.add_argument("--case", action="append", help="only these, by the names of their functions")
    args = parser.parse_args()
    interrupted_by_sigterm()
    chosen = tuple(_chosen(short=args.short, only=args.case))
    gcs = not args.short and args.case in (None, [cases.gcs_killed.__name__])
    tell: Tell = partial(print, file=sys.stdout, flush=True)
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints what goes on in its cluster
        return play(chosen, tell, every=not args.case, gcs=gcs)


def play(chosen: tuple[Group, ...], tell: Tell, *, every: bool, gcs: bool) -> int:
    """Each group in turn; `every`: and what goes wrong before a job stands; `gcs`: and its death."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    if chosen:
        with standing() as world:
            tell(f"a cluster stands after {time.monotonic() - began:.0f} s")
            for group in chosen:
                outcomes += told(run(world, group), tell)
            if every:
                outcomes += told((without_room(world), with_a_program_that_no_node_has(world)), tell)
    if gcs:
        with standing(gcs_may_die=True) as world:
            outcomes += told(run(world, cases.WITH_A_GCS_THAT_MAY_DIE), tell)
    short = [outcome for outcome in outcomes if outcome.short is not None]
    tell(f"ray faults: {len(outcomes)} outcomes, {len(short)} fell short, {time.monotonic() - began:.0f} s")
    return 1 if short else 0


def told(outcomes: Iterable[Outcome], tell: Tell) -> Iterator[Outcome]:
    """The same, each told as it comes."""
    for outcome in outcomes:
        result = "as it should" if outcome.short is None else f"FELL SHORT: {outcome.short}"
        tell(f"{outcome.name:<42} {outcome.seconds:6.1f} s  {result}")
        yield outcome


def _chosen(*, short: bool, only: list[str] | None) -> Iterator[Group]:
    names = only or ([case.__name__ for case in cases.SHORT] if short else None)
    for group in cases.GROUPS:
        wanted = tuple(case for case in group.cases if names is None or case.__name__ in names)
        if wanted:
            yield group._replace(cases=wanted)


if __name__ == "__main__":
    sys.exit(main())
