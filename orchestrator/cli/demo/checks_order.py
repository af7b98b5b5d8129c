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
from relight.orchestrator.cli.demo.case import Case, Check, Slot, Verdict, later, slot_of_member, verdict
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


def at_boundary(case: Case) -> bool:
    """Whether the weights come from the trainer's boundary."""
    return case.plan.recover_at == "boundary"


def from_snapshot(case: Case) -> bool:
    """Whether the weights come from the published snapshot."""
    return case.plan.recover_at == "snapshot"


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


def _one_fence(case: Case) -> Verdict:
    fences = case.decided(RouteFenced, case.dead)
    return Verdict(len(fences) == 1, f"{len(fences)} RouteFenced of {case.dead} from the fault on")


def _one_route(case: Case) -> Verdict:
    routes = case.told(RouteAdded, case.replacement)
    return Verdict(len(routes) == 1, f"{len(routes)} RouteAdded of {case.replacement}")


def _dead_stays_fenced(case: Case) -> Verdict:
    routes = case.decided(RouteAdded, case.dead)
    return Verdict(not routes, f"{len(routes)} RouteAdded of {case.dead} from the fault on")


def _route_names_the_version(case: Case) -> Verdict:
    routes = [route for _, route in case.told(RouteAdded, case.replacement)]
    started = case.started(case.replacement)
    wrong = [f"{route.version} at {route.address}" for route in routes if route.version != case.version]
    wrong += [
        f"at {route.address}" for route in routes if started is None or route.address != started.address
    ]
    return verdict(wrong, f"{case.version} at {started.address if started else 'none'}")


def _next_incarnation(case: Case) -> Verdict:
    filled = {
        (Slot(order.engine, order.incarnation), order.node)
        for _, order in case.decided(StartEngine)
        if order.engine == case.dead.engine
    }
    nodes = {order.node for _, order in case.told(StopEngine, case.dead)}
    right = {slot for slot, _ in filled} == {case.replacement} and {node for _, node in filled} == nodes
    return Verdict(right, f"started: {', '.join(sorted(f'{slot} on {node}' for slot, node in filled))}")


def _only_the_replacement_synced(case: Case) -> Verdict:
    members = {slot_of_member(member) for _, order in case.decided(SyncWeights) for member in order.members}
    return Verdict(members == {case.replacement}, f"members: {', '.join(sorted(map(str, members)))}")


def _trainer_not_asked(case: Case) -> Verdict:
    orders = case.decided(SyncWeights)
    return Verdict(not orders, f"{len(orders)} SyncWeights from the fault on")


def _recovered_once(case: Case) -> Verdict:
    records = [record for _, record in case.decided(RecoveryFinished)]
    told = [f"{record.engine}.{record.incarnation} {record.outcome}" for record in records]
    right = [(record.engine, record.outcome) for record in records] == [(case.dead.engine, "done")]
    return Verdict(right, f"RecoveryFinished: {', '.join(told) or 'none'}")


CHECKS = (
    Check("decisions stand in the order of the rules", _decisions_in_order),
    Check("facts stand in their order", _facts_in_order),
    Check("each fact answers a decision", _answers),
    Check("one death was told", _one_death),
    Check("the death was told as it was", _right_cause),
    Check("the fence follows from the death", _fence_follows_the_death),
    Check("one fence of the dead incarnation", _one_fence),
    Check("one route of the replacement", _one_route),
    Check("the dead incarnation was never routed again", _dead_stays_fenced),
    Check("the route names version and address", _route_names_the_version),
    Check("the slot was filled with its next incarnation", _next_incarnation),
    Check("only the replacement was synced", _only_the_replacement_synced, at_boundary),
    Check("the trainer was not asked", _trainer_not_asked, from_snapshot),
    Check("one recovery finished", _recovered_once),
)
