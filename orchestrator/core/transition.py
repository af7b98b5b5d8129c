"""One fact about one engine: look it up in the table, learn from it, enter the next phase."""

from relight.events.facts import AnyFact, NodeUp
from relight.events.values import Phase
from relight.orchestrator.core.absorb import absorb, first_line
from relight.orchestrator.core.enter import enter
from relight.orchestrator.core.guards import Case
from relight.orchestrator.core.sync import confirm_route
from relight.orchestrator.core.table import NEXT


def transition(case: Case) -> None:
    """Apply the fact to the engine. An absent pair is counted and alarmed, never dropped in silence."""
    work, name, before = case.work, case.name, case.engine.phase
    rows = NEXT.get((before, type(case.fact)))
    if rows is None:
        work.count("absent")
        said = f"{type(case.fact).__name__} of {name}.{case.engine.incarnation} in {before}"
        work.alarm("protocol", said, reason="no agent that keeps the protocol says this here")
        return
    waiting_for = case.engine.intent
    absorb(case)
    after = next(phase for guard, phase in rows.items() if guard(case))
    if after is not before:
        enter(work, name, after, reason=_reason(case.fact))
    elif before is Phase.SERVING and waiting_for is not None and case.engine.intent is None:
        confirm_route(work, name)


def _reason(fact: AnyFact) -> str:
    """A fact as a reason: its name, and what it says of why, without the lines of log below that."""
    if isinstance(fact, NodeUp):
        return f"node {fact.node} reported"
    said = getattr(fact, "error", None) or getattr(fact, "detail", None) or getattr(fact, "cause", None)
    return f"{type(fact).__name__}: {first_line(said)}" if said else type(fact).__name__
