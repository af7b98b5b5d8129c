"""The core's three entrances: a fact, the passing of time, and a new epoch. All are pure."""

import msgspec

from relight.events.decisions import ReportRequested
from relight.events.facts import (
    AnyFact,
    ApprovalGiven,
    DrainRequested,
    EngineStopped,
    HoldRequested,
    JobFinished,
    NodeSilent,
    NodeUp,
    OfEngine,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
    RouteSuspected,
    SafeBoundary,
    TrainerSilent,
    WeightsPublished,
    WeightsSynced,
)
from relight.events.ids import EngineName, EntryId
from relight.events.schema import NodeRecord
from relight.events.values import Phase
from relight.events.version import BASE
from relight.orchestrator.core import (
    boundary,
    floor,
    moves,
    nodes,
    parts,
    recovery,
    rolling,
    sync,
    timers,
    wishes,
)
from relight.orchestrator.core.enter import enter, may_start, order_stop
from relight.orchestrator.core.guards import Case
from relight.orchestrator.core.job import ENDED_FOR_GOOD, Job, Step, Work
from relight.orchestrator.core.transition import transition


def step(job: Job, fact: AnyFact, *, now: int, cause: EntryId | None = None) -> Step:
    """What follows from `fact`, received at bus time `now` (ms); `cause` is its entry's id."""
    work = Work(job, now=now, cause=cause)
    _apply(work, fact)
    _advance(work)
    return work.done()


def tick(job: Job, *, now: int) -> Step:
    """What follows from the passing of time alone."""
    work = Work(job, now=now)
    timers.tick(work)
    _advance(work)
    return work.done()


def committed(job: Job, *, now: int) -> Step:
    """The last step stands on the bus since `now`: recoveries that it ended are recorded."""
    work = Work(job, now=now)
    recovery.committed(work)
    return work.done()


def take_over(job: Job, *, now: int, bus: str) -> Step:
    """A new epoch begins: everybody is asked what is true before anything is started or routed.

    `bus` is the server's stamp. Where it is another one than the state was written on, acknowledged
    entries may be gone: no route stands before its agent has spoken.
    """
    work = Work(job, now=now)
    reason = f"epoch {job.epoch} takes over"
    _take_settings(work)
    if job.meta.bus != bus:
        work.learn(bus=bus)
        _trust_nobody(work)
    for node in work.meta.nodes:
        nodes.ask_report(work, node, reason=reason)
    if work.meta.run and not work.meta.finished:
        deadline = work.after(work.settings.report_s)
        work.decide(ReportRequested, reason=reason, run=work.meta.run, deadline=deadline)
    return work.done()


def _take_settings(work: Work) -> None:
    """The settings of this epoch stand in the state; others than those of the epoch before are named."""
    before, now = work.meta.settings, msgspec.to_builtins(work.settings)
    if before == now:
        return
    work.learn(settings=now)
    if not before:
        return
    changed = [name for name in now if now[name] != before.get(name)]
    detail = "; ".join(f"{name}: {before.get(name)} before, {now[name]} now" for name in changed)
    work.alarm("settings", detail, reason="the epoch before decided by other settings")
    if before.get("mode") == "observe":
        _trust_no_moved_version(work)


def _trust_no_moved_version(work: Work) -> None:
    """While the job was only observed its trainer moved the weights by itself, and nobody proved them."""
    for name, engine in list(work.engines.items()):
        if engine.phase is Phase.SERVING and engine.version != work.meta.version:
            enter(work, name, Phase.SILENT, reason="its weights may have moved while the job was observed")


def _trust_nobody(work: Work) -> None:
    work.learn(
        nodes={name: NodeRecord(boot=record.boot) for name, record in work.meta.nodes.items()},
        boundary=None,
        sync=None,
    )
    for name, engine in list(work.engines.items()):
        if engine.phase in (Phase.SERVING, Phase.DRAINING, Phase.STALE, Phase.SYNCING, Phase.VERIFYING):
            enter(work, name, Phase.SILENT, reason="the bus is another one than before")


def _apply(work: Work, fact: AnyFact) -> None:
    match fact:
        case NodeUp():
            nodes.node_up(work, fact)
        case NodeSilent():
            nodes.node_silent(work, fact)
        case TrainerSilent():
            boundary.trainer_silent(work, fact)
        case SafeBoundary():
            boundary.boundary_told(work, fact)
        case WeightsPublished():
            sync.weights_published(work, fact)
        case WeightsSynced():
            sync.weights_synced(work, fact)
        case JobFinished():
            boundary.job_finished(work, fact)
        case HoldRequested() | ApprovalGiven():
            wishes.heard(work, fact)
        case ReleaseRequested() | RestartRequested() | DrainRequested() | RetireRequested():
            wishes.heard(work, fact)
        case _:
            _of_engine(work, fact)


def _of_engine(work: Work, fact: OfEngine) -> None:
    """Nothing that is said by or for another incarnation has an effect, but the proof that it is gone."""
    engine = work.engines.get(fact.engine)
    if engine is None:
        work.count("unknown")
    elif isinstance(fact, EngineStopped) and fact.node not in engine.nodes:
        _left_is_gone(work, fact)
    elif parts.speaker(engine, fact) not in engine.nodes:
        work.count("foreign")
    elif fact.incarnation == engine.incarnation:
        transition(Case(work, fact.engine, fact))  # type: ignore[arg-type]
    elif fact.incarnation < engine.incarnation:
        if isinstance(fact, EngineStopped):
            _left_is_gone(work, fact)
        work.count("late")
    elif not isinstance(fact, RouteSuspected):
        work.count("ahead")
        node = parts.speaker(engine, fact)
        record = work.meta.nodes.get(node)
        if record is not None and record.asked is None:
            nodes.ask_report(work, node, reason=f"{fact.engine}.{fact.incarnation} is not known here")


def _left_is_gone(work: Work, fact: EngineStopped) -> None:
    engine = work.engines[fact.engine]
    gone = tuple(
        left for left in engine.left if (left.incarnation, left.node) != (fact.incarnation, fact.node)
    )
    if len(gone) != len(engine.left):
        work.put(fact.engine, left=gone)


def _advance(work: Work) -> None:
    """What the job as a whole can do now. Level-triggered: it asks what is true, not what has changed."""
    sync.settle_sync(work)
    _end_what_lives(work)
    _take_out_who_waited(work)
    moves.move_who_waited(work)
    for name in sorted(work.engines):
        _start_if_due(work, name)
        _have_it_kept(work, name)
    _verify_base(work)
    sync.load_snapshot(work)
    sync.order_sync(work)
    boundary.release_if_done(work)
    rolling.go_on(work)
    floor.watch(work)


def _end_what_lives(work: Work) -> None:
    """A part that lives on where the whole has ended is stopped."""
    for name, engine in list(work.engines.items()):
        if engine.phase in ENDED_FOR_GOOD and parts.alone(engine):
            enter(work, name, Phase.STOPPING, reason="a part of it lives on")


def _start_if_due(work: Work, name: EngineName) -> None:
    engine = work.engines[name]
    if engine.phase is Phase.BACKOFF and engine.not_before <= work.now and may_start(work, name):
        enter(work, name, Phase.STARTING, reason=_why_start(work, name))


def _take_out_who_waited(work: Work) -> None:
    """Engines whose end an operator asked for leave, one after the other, as soon as the floor allows, and no
    hold stands against it."""
    if work.meta.hold:
        return
    for name in sorted(work.engines):
        engine = work.engines[name]
        wanted = engine.phase is Phase.SERVING and engine.then != "restart"
        if wanted and not floor.leaves_too_few(work, name):
            phase = Phase.DRAINING if engine.then == "drained" else Phase.STOPPING
            enter(work, name, phase, reason="an operator asked for it, and enough others serve")


def _have_it_kept(work: Work, name: EngineName) -> None:
    """The agent keeps what an operator said of the slot, so that it outlives this state."""
    engine = work.engines[name]
    untold = engine.wished and engine.kept != engine.then and engine.intent is None
    if untold and engine.phase in ENDED_FOR_GOOD and work.reported(engine.node):
        order_stop(work, name, reason=f"its agent is to keep that it is {engine.then}")


def _why_start(work: Work, name: EngineName) -> str:
    engine = work.engines[name]
    if engine.recovery is not None:
        return f"{name}.{engine.recovery.incarnation} was lost: {engine.recovery.why}"
    return "the slot is empty"


def _verify_base(work: Work) -> None:
    """Before any trainer has spoken, an engine's own weights are the job's version."""
    for name, engine in list(work.engines.items()):
        at_base = engine.phase is Phase.STALE and engine.version == work.meta.version == BASE
        if at_base and work.told(engine):
            enter(work, name, Phase.VERIFYING, reason="the job is at its base weights")
