"""The audit: every check over one evidence. Pure, so that each is proven by injecting its fault."""

from typing import NamedTuple

from relight.orchestrator.cli.demo import (
    checks_bus,
    checks_left,
    checks_order,
    checks_processes,
    checks_replay,
    checks_samples,
    checks_survivors,
    checks_trainer,
    checks_weights,
)
from relight.orchestrator.cli.demo.case import Case, Check
from relight.orchestrator.cli.demo.evidence import Evidence

CHECKS: tuple[Check, ...] = (
    *checks_samples.CHECKS,
    *checks_replay.CHECKS,
    *checks_trainer.CHECKS,
    *checks_weights.CHECKS,
    *checks_order.CHECKS,
    *checks_bus.CHECKS,
    *checks_processes.CHECKS,
    *checks_survivors.CHECKS,
    *checks_left.CHECKS,
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
