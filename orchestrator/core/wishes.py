"""What operators ask for. A wish for what is no more, or told before, is counted and has no effect."""

import msgspec

from relight.events.facts import (
    ApprovalGiven,
    DrainRequested,
    HoldRequested,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
)
from relight.events.ids import EngineName
from relight.orchestrator.core import nodes, rolling
from relight.orchestrator.core.guards import Case
from relight.orchestrator.core.job import Work
from relight.orchestrator.core.restraint import is_withheld
from relight.orchestrator.core.transition import transition

Wish = HoldRequested | ApprovalGiven | ReleaseRequested | RestartRequested | DrainRequested | RetireRequested


def heard(work: Work, wish: Wish) -> None:
    """Do what an operator asks for, or take note of it until it may be done."""
    match wish:
        case HoldRequested():
            work.learn(hold=True)
        case ApprovalGiven():
            _approved(work, wish)
        case ReleaseRequested(engine=None):
            _released(work)
        case RestartRequested(engine=None):
            rolling.begin(work)
        case _:
            _of_engine(work, wish)


def _approved(work: Work, fact: ApprovalGiven) -> None:
    for name, engine in list(work.engines.items()):
        recovering = engine.recovery
        if recovering is not None and recovering.id == fact.recovery and not recovering.approved:
            work.put(name, recovery=msgspec.structs.replace(recovering, approved=True))
            _go_on(work, name, reason="an operator approved the recovery")
            return
    work.count("late")


def _released(work: Work) -> None:
    """What was withheld is asked for; what is withheld for another reason stays so."""
    work.learn(hold=False)
    for name, engine in list(work.engines.items()):
        if is_withheld(engine):
            _go_on(work, name, reason="the job is no longer on hold")


def _go_on(work: Work, name: EngineName, *, reason: str) -> None:
    """Ask for the open step, unless a node of it has not reported under this epoch: its report asks then."""
    if work.told(work.engines[name]):
        nodes.ask_again(work, name, reason=reason)


def _of_engine(
    work: Work, fact: ReleaseRequested | RestartRequested | DrainRequested | RetireRequested
) -> None:
    engine = work.engines.get(fact.engine) if fact.engine is not None else None
    if fact.engine is None or engine is None or fact.incarnation not in (None, engine.incarnation):
        work.count("late")
        return
    transition(Case(work, fact.engine, fact))
