"""Checks of the other engines, where there are any: they noticed nothing."""

from relight.events.decisions import LoadWeights, RouteFenced, StartEngine, StopEngine, VerifyEngine
from relight.orchestrator.cli.demo.checks.case import Case, Check, Verdict, verdict

HOLDS = ("/pause", "/resume", "/sleep", "/abort_requests", "/reset_prefix_cache", "/collective_rpc")
"""Routes that would hold, abort or change a running engine; a health check through the core is none."""


def has_survivors(case: Case) -> bool:
    return bool(case.survivors)


def _same_incarnation(case: Case) -> Verdict:
    wrong: list[str] = []
    for before in case.evidence.before:
        after = next((look for look in case.evidence.after if look.engine == before.engine), None)
        if before.engine in case.survivors and (
            after is None or (after.incarnation, after.processes) != (before.incarnation, before.processes)
        ):
            wrong.append(f"{before.engine} is not what it was")
    return verdict(wrong, f"{', '.join(case.survivors)}: same incarnation, same processes")


def _unfenced(case: Case) -> Verdict:
    fences = [str(fence.engine) for fence in case.meanwhile(RouteFenced) if fence.engine in case.survivors]
    return verdict(fences, "no RouteFenced")


def _unordered(case: Case) -> Verdict:
    kinds = (StopEngine, StartEngine, LoadWeights, VerifyEngine)
    orders = [order for kind in kinds for order in case.meanwhile(kind) if order.engine in case.survivors]
    return verdict([f"{type(order).__name__} {order.engine}" for order in orders], "no order but probes")


def _unheld(case: Case) -> Verdict:
    """By the survivors' own access logs, from the fault to the end of the recovery."""
    end_ms = case.recovered.time if case.recovered else 0
    held = [
        f"{request.method} {request.path} at {request.engine}"
        for request in case.evidence.requests
        if request.engine in case.survivors
        and case.fault.wall_ms <= request.time_ms <= end_ms
        and request.path.partition("?")[0] in HOLDS
    ]
    return verdict(held, "no pause, no abort, no reload in their logs")


def _unbroken(case: Case) -> Verdict:
    told = {witness.engine: witness for witness in case.evidence.witnesses}
    wrong = [
        f"{name} was not witnessed" for name in case.survivors if not (name in told and told[name].complete)
    ]
    wrong += [f"{witness.broken} broken on {name}" for name, witness in told.items() if witness.broken]
    whole = sum(witness.complete for witness in told.values())
    return verdict(wrong, f"{whole} generations across the recovery, each whole and equal to its reference")


CHECKS = (
    Check("survivors are the same incarnation", _same_incarnation, has_survivors),
    Check("survivors were not fenced", _unfenced, has_survivors),
    Check("survivors were given no order", _unordered, has_survivors),
    Check("survivors were neither paused nor aborted", _unheld, has_survivors),
    Check("survivors generated on without a break", _unbroken, has_survivors),
)
