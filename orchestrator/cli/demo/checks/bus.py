"""Checks of the bus itself: what stands there is whole, chained and readable, and adds up."""

from itertools import pairwise

from relight.events.decisions import Alarm, Decision, RecoveryFinished
from relight.events.ids import BEGINNING
from relight.orchestrator.cli.demo.checks.case import Case, Check, Verdict, verdict

SUM_MS = 5.0
"""Largest difference between the phases' sum and the total: each phase is told in whole milliseconds."""
PHASES = ("detect", "fence", "stop", "start", "boundary", "sync", "verify", "route")


def _decodes(case: Case) -> Verdict:
    count = len(case.evidence.facts) + len(case.evidence.decisions)
    return verdict(case.undecodable, f"{count} entries")


def _parked(case: Case) -> Verdict:
    return Verdict(case.evidence.parked == 0, f"{case.evidence.parked} parked")


def _chained(case: Case) -> Verdict:
    entries = case.evidence.decisions
    befores = [BEGINNING, *(entry.entry_id for entry in entries)]
    wrong = [
        f"{entry.entry_id} follows {entry.after}, not {before}"
        for before, entry in zip(befores, entries, strict=False)
        if entry.after != before
    ]
    return verdict(wrong[:3], f"{len(entries)} entries, each names the one before it")


def _decided(case: Case) -> list[Decision]:
    return [message for _, message in case.decisions if isinstance(message, Decision)]


def _epochs_rise(case: Case) -> Verdict:
    epochs = [decision.epoch for decision in _decided(case)]
    falls = [f"{left} then {right}" for left, right in pairwise(epochs) if right < left]
    return verdict(falls, f"epochs {', '.join(str(epoch) for epoch in sorted(set(epochs)))}")


def _takeovers(case: Case) -> Verdict:
    """One epoch a life of the orchestrator."""
    kills = sum(
        struck.what == "orchestrator" for injection in case.evidence.injections for struck in injection.struck
    )
    epochs = len({decision.epoch for decision in _decided(case)})
    return Verdict(epochs == 1 + kills, f"{epochs} epochs, {kills} orchestrators killed")


def _unique(case: Case) -> Verdict:
    ids = [decision.id for decision in _decided(case)]
    return Verdict(len(set(ids)) == len(ids), f"{len(ids)} decisions, {len(set(ids))} ids")


def _reasons(case: Case) -> Verdict:
    bare = [f"{type(decision).__name__} {decision.id}" for decision in _decided(case) if not decision.reason]
    return verdict(bare, f"{len(_decided(case))} decisions give one")


def _phases(case: Case) -> Verdict:
    """Every phase is told and their sum is the total."""
    records = [record for _, record in case.decided(RecoveryFinished)]
    if not records:
        return Verdict(False, "no RecoveryFinished")
    phases = records[-1].phases
    told = {name: getattr(phases, name) for name in PHASES}
    total = phases.total
    silent = [name for name, value in told.items() if value is None and name not in _unknowable(case)]
    sum_ = sum(value for value in told.values() if value is not None)
    wrong = [f"no {name}" for name in silent]
    if total is None or abs(total - sum_) > SUM_MS:
        wrong.append(f"sum {sum_:.0f} ms, total {total} ms")
    return verdict(wrong, f"sum {sum_:.0f} ms")


def _unknowable(case: Case) -> set[str]:
    """A new agent cannot know when a process ended while none watched; a snapshot needs no sync."""
    missing = {"detect"} if case.plan.fault == "kill-agent" else set[str]()
    return missing | ({"boundary", "sync"} if case.plan.recover_at == "snapshot" else set())


def _no_alarm(case: Case) -> Verdict:
    alarms = [f"{alarm.kind}: {alarm.detail}" for _, alarm in case.told(Alarm)]
    return verdict(alarms, "none from the first process to the last")


CHECKS = (
    Check("every entry decodes", _decodes),
    Check("nothing was parked", _parked),
    Check("decisions are chained without a gap", _chained),
    Check("epochs never fall", _epochs_rise),
    Check("one epoch for each life of the orchestrator", _takeovers),
    Check("decision ids are unique", _unique),
    Check("every decision gives a reason", _reasons),
    Check("the recovery's phases add up", _phases),
    Check("no alarm was raised", _no_alarm),
)
