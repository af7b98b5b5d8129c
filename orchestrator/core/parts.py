"""Engines over several nodes: where their parts are, and what each node has told of its part.

The head and the further parts are one unit. An incarnation is up when each of its nodes has told so, and gone
when each of them has proven it. What a node has not reported is not known. An engine on one node has no
further parts, and nothing here concerns it.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from relight.events.facts import OfEngine, OfPart
from relight.events.ids import EngineName, NodeName
from relight.events.schema import NOWHERE, EngineState, Part
from relight.events.values import EngineReport, Phase, Place, Process
from relight.orchestrator.core.job import ENDED_FOR_GOOD, Work


def speaker(engine: EngineState, fact: OfEngine) -> NodeName:
    """The node that a fact about the engine speaks of."""
    node = fact.node if isinstance(fact, OfPart) else None
    return engine.node if node is None else node


def missing(engine: EngineState) -> tuple[int, ...]:
    """The parts that no node has reported."""
    return tuple(number for number, node in enumerate(engine.nodes) if node == NOWHERE)


def remaining(engine: EngineState) -> tuple[Place, ...]:
    """Where the incarnation is not proven gone yet; nowhere for an engine on one node, whose one proof is
    all there is."""
    return tuple(place for place, gone in _places(engine) if gone < engine.incarnation)


def to_stop(engine: EngineState) -> tuple[Place, ...]:
    """Whom a stop concerns: where something may remain; everybody, once it has ended and is to be kept so."""
    everywhere = tuple(place for place, _ in _places(engine)) or (_head(engine),)
    return everywhere if engine.phase in ENDED_FOR_GOOD else remaining(engine) or everywhere


def _places(engine: EngineState) -> Iterator[tuple[Place, int]]:
    if engine.parts:
        yield _head(engine), engine.gone
        for part in engine.parts:
            yield Place(part.node, part.processes), part.gone


def _head(engine: EngineState) -> Place:
    return Place(engine.node, engine.processes)


def place(engine: EngineState, number: int) -> Place:
    """Where part `number` is, and what is known of it there."""
    if number == 0:
        return _head(engine)
    part = engine.parts[number - 1]
    return Place(part.node, part.processes)


def alone(engine: EngineState) -> bool:
    """Whether a further part is up, as its node last told."""
    return any(part.gone < part.up == engine.incarnation for part in engine.parts)


def stand(engine: EngineState) -> bool:
    """Whether each further part is up, as its node last told."""
    return all(part.up == engine.incarnation for part in engine.parts)


def taken(work: Work, node: NodeName, report: EngineReport) -> None:
    """An engine that nobody knew, as the node with its head or with a further part reports it."""
    parts = (Part(),) * (report.parts - 1)
    work.engines[report.engine] = EngineState(
        node=NOWHERE if report.part else node, parts=parts, incarnation=report.incarnation, since=work.now
    )


def resized(work: Work, report: EngineReport) -> None:
    """The head's node file says how many parts there are; of an engine that is there, at its next start."""
    engine = work.engines[report.engine]
    more = report.parts - 1 - len(engine.parts)
    if more and not report.part and engine.phase in (Phase.NEW, Phase.BACKOFF, *ENDED_FOR_GOOD):
        work.put(report.engine, parts=(*engine.parts[: report.parts - 1], *(Part(),) * more))


def reported(work: Work, node: NodeName, report: EngineReport) -> None:
    """Take note of what a node tells of its part. What lives there is not gone, whatever was proven."""
    name = report.engine
    engine = work.engines[name]
    same = report.incarnation == engine.incarnation
    if same and report.state in ("starting", "up", "paused", "stopping", "unknown"):
        _put(work, name, node, gone=0)
    if report.part:
        up = report.incarnation if report.state in ("up", "paused") else 0
        known = engine.parts[report.part - 1].processes if same else ()
        _put(work, name, node, up=up, processes=report.processes or known)


def started(work: Work, name: EngineName, node: NodeName, processes: tuple[Process, ...]) -> None:
    """The part at `node` is up at the engine's incarnation."""
    _put(work, name, node, up=work.engines[name].incarnation, processes=processes)


def proven_gone(work: Work, name: EngineName, node: NodeName) -> None:
    """The engine's incarnation is proven gone from `node`."""
    _put(work, name, node, gone=work.engines[name].incarnation, processes=())


def settle(work: Work, name: EngineName, number: int, node: NodeName, *, gone: int = 0) -> None:
    """Part `number` has its place at `node`, where nothing of it is known but what `gone` tells."""
    engine = work.engines[name]
    if number == 0:
        work.put(name, node=node, processes=(), gone=gone if engine.parts else 0)
        return
    parts = list(engine.parts)
    parts[number - 1] = Part(node=node, gone=gone)
    work.put(name, parts=tuple(parts))


def _put(work: Work, name: EngineName, node: NodeName, **changes: object) -> None:
    engine = work.engines[name]
    if engine.parts and node == engine.node:
        work.put(name, **changes)
    elif engine.parts:
        changed = (replace(part, **changes) if part.node == node else part for part in engine.parts)
        work.put(name, parts=tuple(changed))
