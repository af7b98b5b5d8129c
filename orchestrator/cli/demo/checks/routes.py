"""Checks of fences, routes and incarnations: at most one at a time, and only with proven weights."""

from relight.events.decisions import (
    RecoveryFinished,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
    SyncWeights,
)
from relight.orchestrator.cli.demo.checks.case import (
    Case,
    Check,
    Slot,
    Verdict,
    at_boundary,
    from_snapshot,
    slot_of_member,
    verdict,
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
    Check("one fence of the dead incarnation", _one_fence),
    Check("one route of the replacement", _one_route),
    Check("the dead incarnation was never routed again", _dead_stays_fenced),
    Check("the route names version and address", _route_names_the_version),
    Check("the slot was filled with its next incarnation", _next_incarnation),
    Check("only the replacement was synced", _only_the_replacement_synced, at_boundary),
    Check("the trainer was not asked", _trainer_not_asked, from_snapshot),
    Check("one recovery finished", _recovered_once),
)
