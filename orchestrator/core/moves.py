"""Engines of a silent node go to a spare on another one; what they leave there is never trusted again.

A silent node gives no proof, so the old incarnation stays in `left` until its node has proven it gone, and
nothing is started for the engine on that node before. A return in time costs nothing.
"""

from msgspec.structs import replace

from relight.events.decisions import StopEngine
from relight.events.ids import EngineName, NodeName
from relight.events.schema import NOWHERE, EngineState, Left, Meta
from relight.events.values import EngineReport, Phase, Process
from relight.orchestrator.core import parts, recovery
from relight.orchestrator.core.enter import enter
from relight.orchestrator.core.job import ENDED_FOR_GOOD, Work
from relight.orchestrator.core.restraint import withholds
from relight.orchestrator.settings import Settings

MOVED = (Phase.SILENT, Phase.STARTING, Phase.STOPPING, Phase.BACKOFF)
"""Phases in which an engine waits for a silent node."""


def move_who_waited(work: Work) -> None:
    """Move each engine of which a node has been silent for long enough, where there is a spare for it."""
    meta = work.meta
    quiet, counted = silence(work)
    if not quiet or 2 * len(quiet) > counted or meta.hold or meta.finished:
        return
    for name in sorted(work.engines):
        engine = work.engines[name]
        at = moves_at(work.settings, meta, engine)
        if at is None or at > work.now:
            continue
        if (to := _spares_for(work, engine)) is None:
            _name_what_it_waits_for(work, name)
            continue
        why = f"node {', '.join(engine.nodes[number] for number in to)} is silent"
        if engine.recovery is None and engine.incarnation > 0:
            recovery.begin(work, name, why=why)
        under_way = work.engines[name].recovery
        if under_way is None or under_way.approved:
            _move(work, name, to, why=why)


def silence(work: Work) -> tuple[list[NodeName], int]:
    """The nodes that are silent, and how many there are in all.

    A silent one that its engines have left for others is none of them: a long job loses one after the other.
    """
    homes = {node for engine in work.engines.values() for node in engine.nodes}
    nodes = [node for node, record in work.meta.nodes.items() if node in homes or not record.silent]
    return [node for node in nodes if work.meta.nodes[node].silent], len(nodes)


def no_spare(meta: Meta, engine: EngineState) -> str | None:
    """What an engine waits for whose node is silent, if no other node has a spare; None for any other."""
    lost = [node for node in engine.nodes if _is_silent(meta, node)]
    if not lost or engine.phase not in MOVED or engine.then != "restart":
        return None
    each = meta.nodes[lost[0]].each
    spare = f"there is no node with {each} free" if each else "no other node has a spare"
    if engine.parts:
        spare = "no other node has a spare for a part of it"
    return f"node {', '.join(lost)} is silent, and {spare}"


def _name_what_it_waits_for(work: Work, name: EngineName) -> None:
    engine = work.engines[name]
    why = no_spare(work.meta, engine)
    node = next(node for node in engine.nodes if _is_silent(work.meta, node))
    record = work.meta.nodes[node]
    if why is not None and name not in record.missed_by:
        work.alarm("waiting", f"{name} waits: {why}", reason="it goes to the first node that has a spare")
        missed_by = (*record.missed_by, name)
        work.learn(nodes={**work.meta.nodes, node: replace(record, missed_by=missed_by)})


def moves_at(settings: Settings, meta: Meta, engine: EngineState) -> int | None:
    """The bus time (ms) from which the engine may be moved; None where it does not wait for a silent node."""
    silent = [meta.nodes[node].silent_since for node in engine.nodes if _is_silent(meta, node)]
    if not silent or engine.phase not in MOVED or engine.then != "restart":
        return None
    since = engine.since if engine.phase is Phase.SILENT else 0
    return max(since, *silent) + int(settings.move_after_s * 1000)


def _is_silent(meta: Meta, node: NodeName) -> bool:
    return node in meta.nodes and meta.nodes[node].silent


def _spares_for(work: Work, engine: EngineState) -> dict[int, NodeName] | None:
    """A spare on another node for each part whose node is silent; None where there are not enough."""
    taken = {*engine.nodes, *(left.node for left in engine.left)}
    free = [
        node
        for node, record in sorted(work.meta.nodes.items())
        if node not in taken and work.reported(node) and record.spares > 0
        if record.spare_parts or not engine.parts
    ]
    lost = [number for number, node in enumerate(engine.nodes) if _is_silent(work.meta, node)]
    return dict(zip(lost, free, strict=False)) if len(free) >= len(lost) else None


def _move(work: Work, name: EngineName, to: dict[int, NodeName], *, why: str) -> None:
    """What is left of it elsewhere is stopped first: the parts of an incarnation are one unit."""
    for number, spare in to.items():
        _replace(work, name, number, spare)
    engine = work.put(name, address=None)
    if engine.phase is Phase.BACKOFF:
        return
    phase = Phase.STOPPING if parts.remaining(engine) else Phase.STARTING
    have = "has a spare" if len(to) == 1 else "have spares"
    enter(work, name, phase, reason=f"{why}, and {', '.join(to.values())} {have}")


def _replace(work: Work, name: EngineName, number: int, spare: NodeName) -> None:
    engine, record = work.engines[name], work.meta.nodes[spare]
    place = parts.place(engine, number)
    remains = place in parts.remaining(engine) if engine.parts else engine.phase is not Phase.BACKOFF
    if remains:
        leave_behind(work, name, place.node, incarnation=engine.incarnation, processes=place.processes)
    work.learn(nodes={**work.meta.nodes, spare: replace(record, spares=record.spares - 1)})
    parts.settle(work, name, number, spare, gone=engine.incarnation)


def is_its_place(work: Work, node: NodeName, report: EngineReport) -> bool:
    """Whether the part that `node` reports has its place there; one that no node had reported has it now."""
    parts.resized(work, report)
    engine = work.engines[report.engine]
    if report.part >= len(engine.nodes):
        work.count("foreign")
        return False
    there = engine.nodes[report.part]
    if there == NOWHERE and node not in engine.nodes:
        parts.settle(work, report.engine, report.part, node)
        return True
    return there == node or seen_elsewhere(work, node, report)


def seen_elsewhere(work: Work, node: NodeName, report: EngineReport) -> bool:
    """`node` reports an engine whose place is another one. Whether it is to be taken as being there: only an
    incarnation that the state does not know of yet, of a move that the bus has lost.
    """
    name, engine = report.engine, work.engines[report.engine]
    alive = report.state in ("starting", "up", "paused", "unknown")
    known = any(left.node == node for left in engine.left)
    if alive and report.incarnation > engine.incarnation:
        if engine.phase not in (Phase.NEW, Phase.BACKOFF, *ENDED_FOR_GOOD):
            place = parts.place(engine, report.part)
            leave_behind(work, name, place.node, incarnation=engine.incarnation, processes=place.processes)
        if node in engine.nodes:  # it holds another part now than it did
            parts.settle(work, name, engine.nodes.index(node), NOWHERE)
        parts.settle(work, name, report.part, node)
        return True
    if alive and not known:
        leave_behind(work, name, node, incarnation=report.incarnation, processes=report.processes)
    if not stop_left(work, name, node, reason=f"{name} is at {', '.join(engine.nodes)}"):
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
