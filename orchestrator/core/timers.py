"""Every wait has a deadline; its end is an event with a reason."""

from collections.abc import Iterator

from relight.events.decisions import LoadWeights, ProbeEngine, StartEngine, StopEngine, VerifyEngine
from relight.events.ids import EngineName, NodeName
from relight.events.schema import EngineState, Left, Meta
from relight.events.values import Phase
from relight.orchestrator.core import floor, moves, parts, recovery
from relight.orchestrator.core.enter import enter, order_stop
from relight.orchestrator.core.job import Job, Work
from relight.orchestrator.core.nodes import ask_report
from relight.orchestrator.core.restraint import is_withheld
from relight.orchestrator.core.sync import expire_sync


def tick(work: Work) -> None:
    """Let every deadline that has passed have its effect."""
    expire_sync(work)
    too_few_at = floor.alarm_at(work.settings, work.meta)
    if too_few_at is not None and too_few_at <= work.now:
        floor.alarm(work, reason="for longer than the settings allow")
    for name, engine in list(work.engines.items()):
        if _is_due(work.meta, engine, work.now, epoch=work.epoch):
            _expired(work, name, engine)
        elif _waits_too_long(work, engine):
            _name_what_it_waits_for(work, name)
    for name, engine in list(work.engines.items()):
        for left in engine.left:
            if _left_is_due(work.meta, left, work.now, epoch=work.epoch):
                moves.stop_left(work, name, left.node, reason="its stop was not proven in time")
    for node, record in list(work.meta.nodes.items()):
        if record.asked is not None and record.asked.deadline <= work.now and not record.silent:
            ask_report(work, node, reason="its report did not come in time")


def _is_due(meta: Meta, engine: EngineState, now: int, *, epoch: int) -> bool:
    due = answer_due(meta, engine, epoch=epoch)
    return due is not None and due <= now


def answer_due(meta: Meta, engine: EngineState, *, epoch: int) -> int | None:
    """When the engine's open step must be answered. One on a silent node, or on one that has not reported
    under this epoch, is asked for again when it speaks; one that is withheld when it may be done."""
    if engine.intent is None or is_withheld(engine):
        return None
    asked: tuple[NodeName, ...] = (engine.node,)
    if engine.parts and isinstance(engine.intent, StartEngine | StopEngine):
        asked = tuple(place.node for place in parts.to_stop(engine))
    return None if all(_is_mute(meta, node, epoch) for node in asked) else engine.intent.deadline


def _is_mute(meta: Meta, node: NodeName, epoch: int) -> bool:
    """Whether the node is known, and a report of it is awaited."""
    record = meta.nodes.get(node)
    return record is not None and (record.silent or record.reported != epoch)


def _left_is_due(meta: Meta, left: Left, now: int, *, epoch: int) -> bool:
    due = _left_due(meta, left, epoch=epoch)
    return due is not None and due <= now


def _left_due(meta: Meta, left: Left, *, epoch: int) -> int | None:
    if left.intent is None or left.intent.dry_run or _is_mute(meta, left.node, epoch):
        return None
    return left.intent.deadline


def _expired(work: Work, name: EngineName, engine: EngineState) -> None:
    match engine.intent:
        case StopEngine():
            _stop_again(work, name, engine)
        case StartEngine() | LoadWeights() | VerifyEngine() | ProbeEngine() as asked:
            reason = f"{type(asked).__name__} was not answered in time"
            recovery.begin(work, name, why=reason)
            enter(work, name, Phase.STOPPING, reason=reason)
        case None:
            pass


def _stop_again(work: Work, name: EngineName, engine: EngineState) -> None:
    reason = "its stop was not proven in time"
    if engine.phase in (Phase.STOPPED, Phase.RETIRED):  # it is gone; its agent is to keep what becomes of it
        order_stop(work, name, reason="its agent has not confirmed what becomes of it")
    elif engine.phase is Phase.DRAINING:
        enter(work, name, Phase.STOPPING, reason="its calls did not end in time")
    else:
        if not engine.alarmed:
            work.alarm("stop", f"{name}.{engine.incarnation}: {reason}", reason=reason)
            work.put(name, alarmed=True)
        order_stop(work, name, reason=reason)


def _waits_too_long(work: Work, engine: EngineState) -> bool:
    if engine.alarmed or work.meta.finished or not _waits_unnamed(engine):
        return False
    return engine.since + int(work.settings.waiting_s * 1000) <= work.now


def _waits_unnamed(engine: EngineState) -> bool:
    """Whether it waits for what only a trainer or another node can bring."""
    lacks_parts = engine.phase in (Phase.NEW, Phase.BACKOFF) and bool(parts.missing(engine))
    return engine.phase is Phase.STALE or lacks_parts


def _name_what_it_waits_for(work: Work, name: EngineName) -> None:
    if lacking := parts.missing(work.engines[name]):
        detail = f"{name} waits for its part {', '.join(map(str, lacking))}: no node has reported it"
        work.alarm("waiting", detail, reason="an engine over several nodes starts when all of them are there")
        work.put(name, alarmed=True)
        return
    detail = f"{name} waits for {what_brings_weights(work.meta)}"
    work.alarm("waiting", detail, reason="an engine without weights serves nobody")
    work.put(name, alarmed=True)


def what_brings_weights(meta: Meta) -> str:
    """What a stale engine waits for."""
    boundary = meta.boundary
    if boundary is None:
        return "the trainer's next safe boundary"
    return f"boundary {boundary.boundary} to export {meta.version}; it exports {boundary.exports}"


def next_wake(job: Job, *, ticked: int) -> int | None:
    """The bus time (ms) at which `tick` is due next, if nothing else happens.

    `ticked` is the time of the last tick: what was due then has had its effect, or waits for something
    else than time, as a start does on a node that is silent.
    """
    return min((at for at in _wakes(job) if at > ticked), default=None)


def _wakes(job: Job) -> Iterator[int]:
    if job.meta.sync is not None:
        yield job.meta.sync.order.deadline
    too_few_at = floor.alarm_at(job.settings, job.meta)
    if too_few_at is not None:
        yield too_few_at
    for engine in job.engines.values():
        due = answer_due(job.meta, engine, epoch=job.epoch)
        if due is not None:
            yield due
        yield from (
            due for left in engine.left if (due := _left_due(job.meta, left, epoch=job.epoch)) is not None
        )
        moves_at = moves.moves_at(job.settings, job.meta, engine)
        if moves_at is not None:
            yield moves_at
        if engine.phase in (Phase.BACKOFF, Phase.STALE) and engine.not_before:
            yield engine.not_before
        if _waits_unnamed(engine) and not engine.alarmed:
            yield engine.since + int(job.settings.waiting_s * 1000)
    for record in job.meta.nodes.values():
        if record.asked is not None and not record.silent:
            yield record.asked.deadline
