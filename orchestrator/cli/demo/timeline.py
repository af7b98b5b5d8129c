"""The recovery in milliseconds: the orchestrator's own record, and the first replayed token at the client."""

from typing import NamedTuple

from relight.events.decisions import RecoveryFinished, RouteAdded
from relight.orchestrator.cli.demo.checks.case import Case
from relight.orchestrator.cli.demo.evidence import Evidence

MEANINGS = {
    "detect": "the fault to EngineDead, as the agent knows it",
    "fence": "to RouteFenced",
    "stop": "to EngineStopped, the proof within it",
    "start": "to EngineStarted",
    "boundary": "to SyncWeights or LoadWeights",
    "sync": "to WeightsLoaded",
    "verify": "to Healthy",
    "route": "to RouteAdded",
    "total": "the fault, or its fact where the fault's moment is not known, to RouteAdded",
}


class Phase(NamedTuple):
    """One line of the timeline."""

    name: str
    ms: float | None
    meaning: str


def timeline(evidence: Evidence) -> list[Phase]:
    """All phases, the total, and from the fault to the route and to the first replayed token."""
    case = Case(evidence)
    records = [record for _, record in case.decided(RecoveryFinished)]
    phases = [
        Phase(name, getattr(records[-1].phases, name) if records else None, meaning)
        for name, meaning in MEANINGS.items()
    ]
    outage = Phase("outage", _outage(case), "the fault to RouteAdded, by the wall clock of this one machine")
    return [
        *phases,
        outage,
        Phase("first_token", _first_replayed(case), "the fault to the first replayed token"),
    ]


def _outage(case: Case) -> float | None:
    routes = case.decided(RouteAdded, case.replacement)
    return float(routes[0][0].time - case.fault.wall_ms) if routes else None


def _first_replayed(case: Case) -> float | None:
    pieces = case.evidence.pieces
    replayed = [piece.at_ms for piece in pieces if piece.attempt > 0 and piece.token_ids]
    return min(replayed) - case.fault.at_ms if replayed else None
