"""One recovery: from the fact that an engine is lost to the route of its replacement, phase by phase."""

from typing import Literal

import msgspec

from relight.events.decisions import RecoveryFinished
from relight.events.ids import EngineName, RecoveryId
from relight.events.schema import Recovery
from relight.events.values import Phase, Phases
from relight.orchestrator.core.job import Work

ORDER = ("fence", "stop", "start", "boundary", "sync", "verify", "route")
"""The phases in the order in which they end. One that was not passed is left out."""


def begin(
    work: Work,
    name: EngineName,
    *,
    why: str,
    detect_ms: float | None = None,
    by: Literal["loss", "sync", "operator"] = "loss",
) -> None:
    """The engine is lost. A loss in the middle of a recovery is a recovery of its own.

    `by`: what led to it. Only a loss counts against the engine's budget; what an operator asked for needs no
    other approval.
    """
    engine = work.engines[name]
    finish(work, name, "superseded")
    recovery = Recovery(
        id=RecoveryId(f"{name}.{engine.incarnation}-{work.next_id()}"),
        incarnation=engine.incarnation,
        why=why,
        budgeted=by == "loss",
        approved=by == "operator" or work.settings.mode != "approve",
        detect_ms=detect_ms,
        began=work.now,
    )
    work.put(name, recovery=recovery)
    if not recovery.approved:
        detail = f"{name}.{engine.incarnation} was lost ({why}); it waits for `relight approve {recovery.id}`"
        work.alarm("approval", detail, reason="recoveries of this job wait for an operator")


def go_on(work: Work, name: EngineName, *, why: str) -> None:
    """Another start is needed: the recovery under way goes on, inside the budget from now on."""
    recovery = work.engines[name].recovery
    if recovery is None:
        begin(work, name, why=why)
    else:
        work.put(name, recovery=msgspec.structs.replace(recovery, budgeted=True))


def mark(work: Work, name: EngineName, phase: str) -> None:
    """`phase` ends now; the first end counts."""
    recovery = work.engines[name].recovery
    if recovery is not None and phase not in recovery.marks:
        work.put(name, recovery=msgspec.structs.replace(recovery, marks={**recovery.marks, phase: work.now}))


def finish(
    work: Work, name: EngineName, outcome: Literal["done", "retired", "cancelled", "superseded"]
) -> None:
    """Write the record of the engine's recovery, if it is in one."""
    recovery = work.engines[name].recovery
    if recovery is None:
        return
    work.command(
        RecoveryFinished,
        name,
        reason=f"{name}.{recovery.incarnation} was lost: {recovery.why}",
        outcome=outcome,
        phases=phases(recovery),
    )
    work.put(name, recovery=None)


def phases(recovery: Recovery) -> Phases:
    """Milliseconds between the marks; the total runs from the fault as far as it is known."""
    spent: dict[str, float] = {}
    before = recovery.began
    for phase in ORDER:
        if phase in recovery.marks:
            spent[phase] = float(recovery.marks[phase] - before)
            before = recovery.marks[phase]
    total = before - recovery.began + (recovery.detect_ms or 0.0)
    return Phases(detect=recovery.detect_ms, total=total, **spent)


def committed(work: Work) -> None:
    """The last step stands on the bus: fences and routes that were decided in it are there now."""
    for name, engine in list(work.engines.items()):
        if engine.recovery is None:
            continue
        if engine.route is None:
            mark(work, name, "fence")
        elif engine.phase is Phase.SERVING:
            mark(work, name, "route")
            finish(work, name, "done")
