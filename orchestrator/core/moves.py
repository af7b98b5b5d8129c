"""Engines of a silent node go to a spare on another one; what they leave there is never trusted again.

A silent node gives no proof, so the old incarnation stays in `left` until its node has proven it gone, and
nothing is started for the engine on that node before. A return in time costs nothing.
"""

from msgspec.structs import replace

from relight.events.decisions import StopEngine
from relight.events.ids import EngineName, NodeName
from relight.events.schema import EngineState, Left, Meta
from relight.events.values import EngineReport, Phase, Process
from relight.orchestrator.core import recovery
from relight.orchestrator.core.enter import enter
from relight.orchestrator.core.job import ENDED_FOR_GOOD, Work
from relight.orchestrator.core.restraint import withholds
from relight.orchestrator.settings import Settings


def move_who_waited(work: Work) -> None:
    """Move each engine whose node has been silent for long enough, where there is a spare."""
    meta = work.meta
    silent = sum(record.silent for record in meta.nodes.values())
    if not silent or 2 * silent > len(meta.nodes) or meta.hold or meta.finished:
        return
    for name in sorted(work.engines):
        engine = work.engines[name]
        at = moves_at(work.settings, meta, engine)
        if at is None or at > work.now or (spare := _spare_for(work, engine)) is None:
            continue
        why = f"node {engine.node} is silent"
        if engine.recovery is None:
            recovery.begin(work, name, why=why)
        state = work.engines[name]
        if state.recovery is not None and state.recovery.approved:
            _move(work, name, spare, why=why)


def moves_at(settings: Settings, meta: Meta, engine: EngineState) -> int | None:
    """The bus time (ms) from which the engine may be moved; None where its node is not silent."""
    record = meta.nodes.get(engine.node)
    if engine.phase is not Phase.SILENT or record is None or not record.silent:
        return None
    return engine.since + int(settings.move_after_s * 1000)


def _spare_for(work: Work, engine: EngineState) -> NodeName | None:
    return next(
        (
            node
            for node in sorted(work.meta.nodes)
            if node != engine.node and work.reported(node) and work.meta.nodes[node].spares > 0
        ),
        None,
    )


def _move(work: Work, name: EngineName, to: NodeName, *, why: str) -> None:
    engine, record = work.engines[name], work.meta.nodes[to]
    leave_behind(work, name, engine.node, incarnation=engine.incarnation, processes=engine.processes)
    work.learn(nodes={**work.meta.nodes, to: replace(record, spares=record.spares - 1)})
    work.put(name, node=to, processes=(), address=None)
    enter(work, name, Phase.STARTING, reason=f"{why}, and {to} has a spare")


def seen_elsewhere(work: Work, node: NodeName, report: EngineReport) -> bool:
    """`node` reports an engine whose place is another one. Whether it is to be taken as being there: only an
    incarnation that the state does not know of yet, of a move that the bus has lost.
    """
    name, engine = report.engine, work.engines[report.engine]
    alive = report.state in ("starting", "up", "paused", "unknown")
    known = any(left.node == node for left in engine.left)
    if alive and report.incarnation > engine.incarnation:
        if engine.phase not in (Phase.NEW, Phase.BACKOFF, *ENDED_FOR_GOOD):
            leave_behind(work, name, engine.node, incarnation=engine.incarnation, processes=engine.processes)
        work.put(name, node=node)
        return True
    if alive and not known:
        leave_behind(work, name, node, incarnation=report.incarnation, processes=report.processes)
    if not stop_left(work, name, node, reason=f"{name} is at {engine.node}"):
        work.count("foreign")
    return False


def leave_behind(
    work: Work, name: EngineName, node: NodeName, *, incarnation: int, processes: tuple[Process, ...]
) -> None:
    """Take note of what is not proven gone from `node`."""
    left = Left(incarnation=incarnation, node=node, processes=processes)
    work.put(name, left=(*work.engines[name].left, left))


def left_anything(work: Work, node: NodeName) -> bool:
    """Whether something there is not proven gone."""
    return any(left.node == node for engine in work.engines.values() for left in engine.left)


def stop_left(work: Work, name: EngineName, node: NodeName, *, reason: str) -> bool:
    """Ask `node` for the end of what was left there, and the proof of it; whether anything was."""
    engine = work.engines[name]
    here = [left for left in engine.left if left.node == node]
    for left in here:
        order = work.decide(
            StopEngine,
            reason=reason,
            dry_run=withholds(work.settings, work.meta, engine, StopEngine),
            engine=name,
            incarnation=left.incarnation,
            node=node,
            processes=left.processes,
            deadline=work.after(work.settings.stop_s),
        )
        asked = replace(left, intent=order)
        engine = work.put(name, left=tuple(asked if each is left else each for each in engine.left))
    return bool(here)
