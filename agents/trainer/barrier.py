"""The barrier: when weights may be exported, and what every order of the orchestrator is answered with.

A pure state machine. What the session does and what the orchestrator decides go in as events; facts to
say come out, and the state says which order is to be exported next and whether the boundary is released.
The rules it keeps:

- an export runs only inside the open boundary that its order names, and one at a time;
- every order is answered exactly once per asking: exported, refused (nothing touched), or void because
  the close cut it off; an order that was answered before gets the same answer again;
- a decision of a lower epoch than one seen before, or one marked `dry_run`, moves no weights.

Orders for a newer run are not ours to refuse: they mean that another trainer has taken over.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from relight.agents.trainer.sync import refusal
from relight.events.decisions import (
    AnyDecision,
    BoundaryReleased,
    ReportRequested,
    RouteAdded,
    RouteFenced,
    StopEngine,
    SyncWeights,
)
from relight.events.errors import UsageError
from relight.events.facts import Fact, SafeBoundary, TrainerSilent, WeightsPublished, WeightsSynced
from relight.events.ids import DecisionId, EngineName, SyncId
from relight.events.schema import Snapshot
from relight.events.values import Member
from relight.events.version import Version

Phase = Literal["rollout", "train", "eval", "checkpoint"]
Scope = Literal["all", "stale"]
Release = Literal["routed", "written"]
Answer = WeightsPublished | WeightsSynced

_NOBODY: frozenset[tuple[EngineName, int]] = frozenset()

ANSWERS_KEPT = 64
"""Orders are asked again within seconds; a run's whole history is not needed."""


class Opened(NamedTuple):
    """The session opens a boundary. No other one is open."""

    step: int
    version: Version
    exports: Version | None
    sync: Scope = "stale"
    phase: Phase = "rollout"
    release: Release = "routed"


class Moved(NamedTuple):
    """What the live parameters are changed inside the boundary."""

    exports: Version | None


class Began(NamedTuple):
    """The session exports the next order now."""


class Ended(NamedTuple):
    """The running export came to this."""

    answer: Answer


class Closed(NamedTuple):
    """The session leaves. An export that still runs is cut off and void, whatever it later reports."""


class CaughtUp(NamedTuple):
    """The state was read: what it holds open is taken like the decisions that may have been missed."""

    snapshot: Snapshot
    tell: bool
    """Say the boundary as it stands: the bus was away, emptied or rolled back."""


Event = Opened | Moved | Began | Ended | Closed | CaughtUp | TrainerSilent | AnyDecision


class Barrier(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's side of one run."""

    run: int
    pushes: bool = False
    subset: bool = True
    epoch: int = 0
    """The highest seen."""
    boundary: int = 0
    """Counts openings."""
    opening: Opened | None = None
    """The last one; it stands while `open`."""
    open: bool = False
    waiting: tuple[SyncWeights, ...] = ()
    running: SyncWeights | None = None
    released: str | None = None
    """Outcome of the open boundary, once the orchestrator has said it."""
    observed: bool = False
    """The orchestrator only observes: it would have released the open boundary, and does nothing."""
    heard: int = 0
    """Decisions about the open boundary, those to wait on included: silence is judged by it."""
    patience: int = 0
    """Latest deadline (bus ms) of an order of the open boundary."""
    answers: Mapping[SyncId, Answer] = {}
    gone: frozenset[tuple[EngineName, int]] = frozenset()
    """Members of open orders that were fenced or stopped after the order came."""
    roster: Mapping[EngineName, Member] = {}
    """Engines as last committed: those that are routed, and members of the last orders."""
    newer: int | None = None
    """A run above ours that was seen: this trainer's words are void."""


class Step(NamedTuple):
    """What follows from one event: the next state, and facts to say in this order."""

    barrier: Barrier
    facts: tuple[Fact, ...] = ()


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
            return Step(_replace(barrier, running=barrier.waiting[0], waiting=barrier.waiting[1:]))
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
    fresh = _replace(
        barrier,
        boundary=barrier.boundary + 1,
        opening=opened,
        open=True,
        released=None,
        observed=False,
        heard=0,
        patience=0,
        gone=_NOBODY,
    )
    return Step(fresh, (stands(fresh),))


def _moved(barrier: Barrier, exports: Version | None) -> Step:
    if not barrier.open:
        raise UsageError("no boundary is open")
    moved = _replace(barrier, opening=_opening(barrier)._replace(exports=exports))
    refused = _refused(moved, f"the boundary exports {exports} now")
    return Step(refused.barrier, (*refused.facts, stands(moved)))


def _ended(barrier: Barrier, answer: Answer) -> Step:
    """An answer for anything but the running export is void: its boundary's close has said so."""
    if barrier.running is None or answer.sync != barrier.running.sync:
        return Step(barrier)
    return Step(_remember(_replace(barrier, running=None), answer), (answer,))


def _closed(barrier: Barrier) -> Step:
    if not barrier.open:
        raise UsageError("no boundary is open")
    refused = _refused(barrier, "boundary closed")
    cut_off = barrier.running
    closed = _replace(refused.barrier, open=False, running=None)
    if cut_off is not None:
        void = refusal(cut_off, "the boundary's close cut it off", touched=barrier.pushes)
        closed = _remember(closed, void)
    last = stands(closed, cut_off=cut_off.sync if cut_off else None)
    return Step(closed, (*refused.facts, last))


def _refused(barrier: Barrier, why: str) -> Step:
    """Every waiting order is refused."""
    answers = [refusal(order, why) for order in barrier.waiting]
    return Step(_remember(_replace(barrier, waiting=()), *answers), tuple(answers))


# --- what the orchestrator decides -------------------------------------------------------------------


def _decided(barrier: Barrier, decision: AnyDecision) -> Step:
    if decision.epoch < barrier.epoch:
        return Step(barrier)
    if decision.dry_run:
        ours = isinstance(decision, BoundaryReleased) and _is_here(barrier, decision.run, decision.boundary)
        return Step(_replace(barrier, observed=True) if ours else barrier)
    barrier = _replace(barrier, epoch=decision.epoch)
    match decision:
        case SyncWeights():
            return _ordered(barrier, decision)
        case BoundaryReleased():
            return Step(_released(barrier, decision.run, decision.boundary, decision.outcome))
        case ReportRequested(run=barrier.run) if barrier.boundary:
            return Step(_heard(barrier), (stands(barrier, answers=decision.id),))
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
        return Step(_heard(barrier), (barrier.answers[order.sync],))
    if order.sync in {known.sync for known in (barrier.running, *barrier.waiting) if known}:
        return Step(barrier)
    why = unfit(barrier, order)
    if why is not None:
        answer = refusal(order, why)
        return Step(_remember(barrier, answer), (answer,))
    named = {(member.engine, member.incarnation) for member in order.members}
    accepted = _replace(
        _listed(_heard(barrier), order.members),
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
    exports = _opening(barrier).exports
    if exports != order.version:
        return f"version {order.version} is not what the boundary exports: {exports}"
    return None


def _released(barrier: Barrier, run: int, boundary: int, outcome: str) -> Barrier:
    if not _is_here(barrier, run, boundary):
        return barrier
    return _replace(_heard(barrier), released=outcome)


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
    return _replace(barrier, gone=barrier.gone | (members & incarnations), roster=roster)


def _listed(barrier: Barrier, members: Iterable[Member]) -> Barrier:
    return _replace(barrier, roster={**barrier.roster, **{member.engine: member for member in members}})


def _superseded(barrier: Barrier, run: int) -> Barrier:
    return _replace(barrier, newer=max(run, barrier.newer or 0))


# --- what the state says -----------------------------------------------------------------------------


def _caught_up(barrier: Barrier, event: CaughtUp) -> Step:
    snapshot, meta = event.snapshot, event.snapshot.meta
    facts = (stands(barrier),) if event.tell and barrier.boundary else ()
    if meta is None:
        return Step(barrier, facts)
    barrier = _replace(
        barrier,
        epoch=max(barrier.epoch, snapshot.epoch),
        roster={
            name: Member(name, engine.incarnation, engine.route.address)
            for name, engine in snapshot.engines.items()
            if engine.route is not None
        },
    )
    if meta.run > barrier.run:
        return Step(_superseded(barrier, meta.run), facts)
    if meta.boundary is not None and meta.boundary.released:
        barrier = _released(barrier, meta.boundary.run, meta.boundary.boundary, "released")
    if meta.sync is None or meta.sync.order.dry_run:
        return Step(barrier, facts)
    step = _ordered(barrier, meta.sync.order)
    return Step(step.barrier, (*facts, *step.facts))


# --- inside --------------------------------------------------------------------------------------------


def stands(
    barrier: Barrier, *, cut_off: SyncId | None = None, answers: DecisionId | None = None
) -> SafeBoundary:
    """The boundary as it stands. Raises UsageError before the first one."""
    opening = _opening(barrier)
    return SafeBoundary(
        run=barrier.run,
        boundary=barrier.boundary,
        step=opening.step,
        version=opening.version,
        exports=opening.exports if barrier.open else None,
        state="open" if barrier.open else "closed",
        phase=opening.phase,
        sync=opening.sync,
        release=opening.release,
        subset=barrier.subset,
        cut_off=cut_off,
        answers=answers,
    )


def _opening(barrier: Barrier) -> Opened:
    if barrier.opening is None:
        raise UsageError("no boundary was opened yet")
    return barrier.opening


def _heard(barrier: Barrier) -> Barrier:
    return _replace(barrier, heard=barrier.heard + 1)


def _remember(barrier: Barrier, *answers: Answer) -> Barrier:
    known = {**barrier.answers, **{answer.sync: answer for answer in answers if answer.sync is not None}}
    return _replace(barrier, answers=dict(list(known.items())[-ANSWERS_KEPT:]))


def _replace(barrier: Barrier, **changes: object) -> Barrier:
    return msgspec.structs.replace(barrier, **changes)
