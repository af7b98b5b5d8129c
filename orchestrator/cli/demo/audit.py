"""The audit: every check over one evidence. Pure, so that each is proven by injecting its fault."""

from typing import NamedTuple

from relight.orchestrator.cli.demo.checks import (
    bus,
    left,
    order,
    processes,
    replay,
    routes,
    samples,
    survivors,
    trainer,
    weights,
)
from relight.orchestrator.cli.demo.checks.case import Case, Check
from relight.orchestrator.cli.demo.evidence import Evidence

CHECKS: tuple[Check, ...] = (
    *samples.CHECKS,
    *replay.CHECKS,
    *trainer.CHECKS,
    *weights.CHECKS,
    *order.CHECKS,
    *routes.CHECKS,
    *bus.CHECKS,
    *processes.CHECKS,
    *survivors.CHECKS,
    *left.CHECKS,
)


class Finding(NamedTuple):
    """One check's result, as it is shown and told in `--json`."""

    name: str
    passed: bool
    detail: str


def audit(evidence: Evidence) -> list[Finding]:
    """What each check that applies says, in the order of the list."""
    case = Case(evidence)
    return [Finding(check.name, *check.judge(case)) for check in CHECKS if check.applies(case)]
