"""Checks of what was decided and told, and in which order."""

from itertools import pairwise
from typing import NamedTuple

from relight.events.decisions import (
    Decision,
    LoadWeights,
    ProbeEngine,
    RecoveryFinished,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
    SyncWeights,
    VerifyEngine,
)
from relight.events.envelope import Entry
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, Fact, Healthy, WeightsLoaded
from relight.events.values import Cause
from relight.orchestrator.cli.demo.checks.case import Case, Check, Slot, Verdict, at_boundary, later, verdict
from relight.orchestrator.cli.demo.evidence import Fault

KILLED = (Cause.SIGNAL, 9)
CAUSES: dict[Fault, tuple[tuple[Cause, int | None], ...]] = {
    "kill-core": (KILLED,),
    "kill-server": (KILLED,),
    "stall": ((Cause.STALL, None),),
    "kill-agent": (KILLED, (Cause.EXIT, None)),
    "kill-orchestrator": (KILLED,),
}
"""What the agent may say of each fault. A new agent cannot know how a process ended while none watched."""


class Seen(NamedTuple):
    """Where a message stands, if it was said."""

    name: str
    entry: Entry | None


def _decisions_in_order(case: Case) -> Verdict:
    old, new = case.dead, case.replacement
    sync: list[Seen] = (
        [_first(case, SyncWeights), _first(case, LoadWeights, new)] if at_boundary(case) else []
    )
    return _in_order(
        case,
        [
            _first(case, RouteFenced, old),
            _first(case, StopEngine, old),
            _first(case, StartEngine, new),
            *sync,
            _first(case, VerifyEngine, new),
            _first(case, RouteAdded, new),
            _first(case, RecoveryFinished),
        ],
    )


def _facts_in_order(case: Case) -> Verdict:
    old, new = case.dead, case.replacement
    return _in_order(
        case,
        [
            _first(case, EngineDead, old),
            _first(case, EngineStopped, old),
            _first(case, EngineStarted, new),
            *([_first(case, WeightsLoaded, new)] if at_boundary(case) else []),
            _first(case, Healthy, new),
        ],
    )


def _first(case: Case, kind: type[Fact] | type[Decision], slot: Slot | None = None) -> Seen:
    """Where the first message of that type after the fault stands."""
    entries = case.told(
        kind, slot, after=case.fault.facts if issubclass(kind, Fact) else case.fault.decisions
    )
    return Seen(kind.__name__, entries[0][0] if entries else None)


def _in_order(case: Case, seen: list[Seen]) -> Verdict:
    wrong = [f"no {name}" for name, entry in seen if entry is None]
    there = [(name, entry) for name, entry in seen if entry is not None]
    wrong += [
        f"{name} before {earlier}"
        for (earlier, before), (name, entry) in pairwise(there)
        if not later(entry, before.entry_id)
    ]
    return verdict(wrong, " < ".join(name for name, _ in there))


def _answers(case: Case) -> Verdict:
    """Each fact names a decision that asked for it."""
    old, new = case.dead, case.replacement
    pairs: list[
        tuple[type[EngineStopped | EngineStarted | WeightsLoaded | Healthy], type[Decision], Slot]
    ] = [
        (EngineStopped, StopEngine, old),
        (EngineStarted, StartEngine, new),
        (WeightsLoaded, LoadWeights, new),
        (Healthy, VerifyEngine, new),
    ]
    wrong: list[str] = []
    count = 0
    for kind, order, slot in pairs:
        asked = {decision.id for _, decision in case.told(order, slot)}
        if kind is Healthy:
            asked |= {decision.id for _, decision in case.told(ProbeEngine, slot)}
        facts = [fact for _, fact in case.told(kind, slot)]
        wrong += [f"{kind.__name__} answers {fact.answers}" for fact in facts if fact.answers not in asked]
        count += len(facts)
    return verdict(wrong, f"{count} answers to decisions about {old} and {new}")


def _one_death(case: Case) -> Verdict:
    deaths = case.told(EngineDead, case.dead)
    return Verdict(len(deaths) == 1, f"{len(deaths)} EngineDead of {case.dead}")


def _right_cause(case: Case) -> Verdict:
    told = [(fact.cause, fact.signal) for _, fact in case.told(EngineDead, case.dead)]
    right = bool(told) and set(told) <= set(CAUSES[case.plan.fault])
    return Verdict(
        right, f"{case.plan.fault}: told as {', '.join(f'{c} {s or str()}'.strip() for c, s in told)}"
    )


def _fence_follows_the_death(case: Case) -> Verdict:
    death = {entry.entry_id for entry, _ in case.told(EngineDead, case.dead)}
    causes = {str(fence.cause) for _, fence in case.decided(RouteFenced, case.dead)}
    return Verdict(
        bool(causes) and causes <= death, f"fenced because of {', '.join(sorted(causes)) or 'nothing'}"
    )


CHECKS = (
    Check("decisions stand in the order of the rules", _decisions_in_order),
    Check("facts stand in their order", _facts_in_order),
    Check("each fact answers a decision", _answers),
    Check("one death was told", _one_death),
    Check("the death was told as it was", _right_cause),
    Check("the fence follows from the death", _fence_follows_the_death),
)
