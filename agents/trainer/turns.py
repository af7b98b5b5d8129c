"""The turns of the barrier: what follows from each event. Pure; the words are in `barrier`."""

from collections.abc import Iterable, Mapping

from relight.agents.trainer.barrier import (
    NOBODY,
    Barrier,
    Began,
    CaughtUp,
    Closed,
    Ended,
    Event,
    Moved,
    Opened,
    Step,
    Use,
    heard,
    opening_of,
    pushes,
    remember,
    replace,
    stands,
)
from relight.agents.trainer.sync import Answer, refusal
from relight.events.decisions import (
    AnyDecision,
    BoundaryReleased,
    LoadWeights,
    ReportRequested,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
    SyncWeights,
    VerifyEngine,
)
from relight.events.errors import UsageError
from relight.events.facts import TrainerSilent
from relight.events.ids import EngineName
from relight.events.values import Member
from relight.events.version import Version


def after(barrier: Barrier, event: Event) -> Step:
    """The barrier after `event`. Raises UsageError for what the session must not do, never for decisions."""
    match event:
        case Opened():
            return _opened(barrier, event)
        case Moved():
            return _moved(barrier, event.exports)
        case Began():
            if barrier.running is not None or not barrier.waiting:
                raise UsageError("an export began that no order asked for, or beside another one")
            return Step(replace(barrier, running=barrier.waiting[0], waiting=barrier.waiting[1:]))
        case Ended():
            return _ended(barrier, event.answer)
        case Closed():
            return _closed(barrier)
        case CaughtUp():
            return _caught_up(barrier, event)
        case TrainerSilent():
            # Not silent at all, only cut off for a while: what was voided is said again.
            ours = event.run == barrier.run and barrier.boundary > 0
            return Step(barrier, (stands(barrier),) if ours else ())
        case _:
            return _decided(barrier, event)


# --- what the session does ---------------------------------------------------------------------------


def _opened(barrier: Barrier, opened: Opened) -> Step:
    if barrier.open:
        raise UsageError(f"boundary {barrier.boundary} is still open")
    fresh = replace(
        barrier,
        boundary=barrier.boundary + 1,
        opening=opened,
        open=True,
        released=None,
        observed=False,
        heard=0,
        patience=0,
        gone=NOBODY,
    )
    return Step(fresh, (stands(fresh),))


def _moved(barrier: Barrier, exports: Version | None) -> Step:
    if not barrier.open:
        raise UsageError("no boundary is open")
    moved = replace(barrier, opening=opening_of(barrier)._replace(exports=exports))
    refused = _refused(moved, f"the boundary exports {exports} now")
    return Step(refused.barrier, (*refused.facts, stands(moved)))


def _ended(barrier: Barrier, answer: Answer) -> Step:
    """An answer for anything but the running export is void: its boundary's close has said so."""
    if barrier.running is None or answer.sync != barrier.running.sync:
        return Step(barrier)
    return Step(remember(replace(barrier, running=None), answer), (answer,))


def _closed(barrier: Barrier) -> Step:
    if not barrier.open:
        raise UsageError("no boundary is open")
    refused = _refused(barrier, "boundary closed")
    cut_off = barrier.running
    closed = replace(refused.barrier, open=False, running=None)
    if cut_off is not None:
        void = refusal(cut_off, "the boundary's close cut it off", touched=bool(pushes(barrier)))
        closed = remember(closed, void)
    last = stands(closed, cut_off=cut_off.sync if cut_off else None)
    return Step(closed, (*refused.facts, last))


def _refused(barrier: Barrier, why: str) -> Step:
    """Every waiting order is refused."""
    answers = [refusal(order, why) for order in barrier.waiting]
    return Step(remember(replace(barrier, waiting=()), *answers), tuple(answers))


# --- what the orchestrator decides -------------------------------------------------------------------


def _decided(barrier: Barrier, decision: AnyDecision) -> Step:
    if decision.epoch < barrier.epoch:
        return Step(barrier)
    if decision.dry_run and isinstance(decision, ReportRequested):  # a report changes nothing
        asked = decision.run == barrier.run and barrier.boundary > 0
        return Step(barrier, (stands(barrier, answers=decision.id),) if asked else ())
    if decision.dry_run:
        ours = isinstance(decision, BoundaryReleased) and _is_here(barrier, decision.run, decision.boundary)
        return Step(replace(barrier, observed=True) if ours else barrier)
    barrier = replace(barrier, epoch=decision.epoch, uses=_used(barrier.uses, decision))
    match decision:
        case SyncWeights():
            return _ordered(barrier, decision)
        case BoundaryReleased():
            return Step(_released(barrier, decision.run, decision.boundary, decision.outcome))
        case ReportRequested(run=barrier.run) if barrier.boundary:
            return Step(heard(barrier), (stands(barrier, answers=decision.id),))
        case RouteAdded():
            member = Member(decision.engine, decision.incarnation, decision.address)
            return Step(_listed(barrier, [member]))
        case RouteFenced() | StopEngine():
            return Step(_left(barrier, {(decision.engine, decision.incarnation)}))
        case _:
            return Step(barrier)


def _ordered(barrier: Barrier, order: SyncWeights) -> Step:
    if order.run > barrier.run:
        return Step(_superseded(barrier, order.run))
    if not barrier.boundary:  # nothing was said yet that ended an older run: its trainer may still answer
        return Step(barrier)
    if order.sync in barrier.answers:
        return Step(heard(barrier), (barrier.answers[order.sync],))
    if order.sync in {known.sync for known in (barrier.running, *barrier.waiting) if known}:
        return Step(barrier)
    why = unfit(barrier, order)
    if why is not None:
        answer = refusal(order, why)
        return Step(remember(barrier, answer), (answer,))
    named = {(member.engine, member.incarnation) for member in order.members}
    accepted = replace(
        _listed(heard(barrier), order.members),
        waiting=(*barrier.waiting, order),
        patience=max(barrier.patience, order.deadline),
        gone=barrier.gone - named,
    )
    return Step(accepted)


def unfit(barrier: Barrier, order: SyncWeights) -> str | None:
    """Why `order` cannot be exported in the boundary as it stands; None where it can."""
    if order.run != barrier.run:
        return f"run {order.run} is over, this is run {barrier.run}"
    if not barrier.open or order.boundary < barrier.boundary:
        return f"boundary {order.boundary} is closed"
    if order.boundary != barrier.boundary:
        return f"boundary {order.boundary} was never opened, {barrier.boundary} is open"
    exports = opening_of(barrier).exports
    if exports != order.version:
        return f"version {order.version} is not what the boundary exports: {exports}"
    return None


def _released(barrier: Barrier, run: int, boundary: int, outcome: str) -> Barrier:
    if not _is_here(barrier, run, boundary):
        return barrier
    return replace(heard(barrier), released=outcome)


def _is_here(barrier: Barrier, run: int, boundary: int) -> bool:
    return barrier.open and (run, boundary) == (barrier.run, barrier.boundary)


def _left(barrier: Barrier, incarnations: set[tuple[EngineName, int]]) -> Barrier:
    orders = [order for order in (barrier.running, *barrier.waiting) if order]
    members = {(member.engine, member.incarnation) for order in orders for member in order.members}
    roster = {
        name: member
        for name, member in barrier.roster.items()
        if (name, member.incarnation) not in incarnations
    }
    return replace(barrier, gone=barrier.gone | (members & incarnations), roster=roster)


def _used(uses: Mapping[EngineName, Use], decision: AnyDecision) -> Mapping[EngineName, Use]:
    """Who reads which snapshot after `decision`. A fence alone ends no load: its agent may be cut off."""
    match decision:
        case LoadWeights():
            return {**uses, decision.engine: Use(decision.version, decision.deadline)}
        case StartEngine(weights=weights) if weights is not None:
            return {**uses, decision.engine: Use(weights.version, decision.deadline)}
        case StartEngine() | VerifyEngine() | RouteAdded() | StopEngine():
            return {engine: use for engine, use in uses.items() if engine != decision.engine}
        case _:
            return uses


def _listed(barrier: Barrier, members: Iterable[Member]) -> Barrier:
    return replace(barrier, roster={**barrier.roster, **{member.engine: member for member in members}})


def _superseded(barrier: Barrier, run: int) -> Barrier:
    return replace(barrier, newer=max(run, barrier.newer or 0))


# --- what the state says -----------------------------------------------------------------------------


def _caught_up(barrier: Barrier, event: CaughtUp) -> Step:
    snapshot, meta = event.snapshot, event.snapshot.meta
    facts = (stands(barrier),) if event.tell and barrier.boundary else ()
    if meta is None:
        return Step(barrier, facts)
    uses: Mapping[EngineName, Use] = {}
    for engine in snapshot.engines.values():
        uses = _used(uses, engine.intent) if engine.intent is not None else uses
    barrier = replace(
        barrier,
        epoch=max(barrier.epoch, snapshot.epoch),
        recover_at=str(meta.settings.get("recover_at", "")),
        uses=uses,
        roster={
            name: Member(name, engine.incarnation, engine.route.address)
            for name, engine in snapshot.engines.items()
            if engine.route is not None
        },
    )
    if meta.run > barrier.run:
        return Step(_superseded(barrier, meta.run), facts)
    if meta.boundary is not None and meta.boundary.released:
        outcome = "refused" if meta.boundary.refused else "done"
        barrier = _released(barrier, meta.boundary.run, meta.boundary.boundary, outcome)
    if meta.sync is None or meta.sync.order.dry_run:
        return Step(barrier, facts)
    step = _ordered(barrier, meta.sync.order)
    return Step(step.barrier, (*facts, *step.facts))
