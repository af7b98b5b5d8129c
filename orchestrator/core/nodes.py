"""Nodes: what their agents report, and their silence."""

from msgspec.structs import replace

from relight.events.decisions import (
    LoadWeights,
    ProbeEngine,
    ReportRequested,
    StartEngine,
    StopEngine,
    VerifyEngine,
)
from relight.events.facts import NodeSilent, NodeUp
from relight.events.ids import EngineName, NodeName
from relight.events.schema import NOWHERE, Command, EngineState, NodeRecord, Then
from relight.events.values import EngineReport, Phase, Weights
from relight.orchestrator.core import moves, parts, recovery
from relight.orchestrator.core.enter import enter, order_probe, order_start, order_stop, order_verify
from relight.orchestrator.core.guards import Case
from relight.orchestrator.core.job import ENDED_FOR_GOOD, Work
from relight.orchestrator.core.sync import order_load, version_moved
from relight.orchestrator.core.transition import transition


def node_up(work: Work, fact: NodeUp) -> None:
    """An agent says what is true. Open steps of its engines are asked for again, never assumed."""
    record = work.meta.nodes.get(fact.node)
    if record is not None and record.asked is not None and not _answers(work, fact, record.asked):
        work.count("early")
        if record.silent:  # it speaks again, after the question of this epoch was put to nobody
            _hear_again(work, fact.node)
        return
    known = record or NodeRecord(boot=fact.boot)
    heard = replace(
        known,
        boot=fact.boot,
        reported=work.epoch,
        silent=False,
        host=fact.host,
        asked=None,
        spares=max(0, fact.spares - len(_on_their_way(work, fact))),
        spare_parts=fact.spare_parts,
        each=fact.each,
        missed_by=(),
    )
    work.learn(nodes={**work.meta.nodes, fact.node: heard})
    for report in fact.engines:
        _seen(work, fact, report)
    for name in sorted(set(engines_on(work, fact.node)) - {report.engine for report in fact.engines}):
        _not_owned(work, name, fact)
    for name in sorted(set(work.engines) - {report.engine for report in fact.engines}):
        moves.stop_left(work, name, fact.node, reason=f"{fact.node} does not tell what became of it there")
    for name in engines_on(work, fact.node):
        _ask_head(work, name, fact.node)


def _on_their_way(work: Work, fact: NodeUp) -> set[EngineName]:
    """Engines that were sent to the node's spares, and of which its agent had not heard when it spoke."""
    listed = {report.engine for report in fact.engines}
    sent = (Phase.STARTING, Phase.STOPPING, Phase.BACKOFF)
    there = {name for name in engines_on(work, fact.node) if work.engines[name].phase in sent}
    return there - listed


def _answers(work: Work, fact: NodeUp, asked: ReportRequested) -> bool:
    """Said under this epoch: an older report may be older than what this epoch knows."""
    return fact.answers == asked.id or fact.max_epoch >= work.epoch


def _hear_again(work: Work, node: NodeName) -> None:
    record = work.meta.nodes[node]
    work.learn(nodes={**work.meta.nodes, node: replace(record, silent=False, asked=None)})
    ask_report(work, node, reason="it speaks again, but of what was true before this epoch")


def _seen(work: Work, fact: NodeUp, report: EngineReport) -> None:
    name = report.engine
    engine = work.engines.get(name)
    if engine is None and report.part < report.parts:
        parts.taken(work, fact.node, report)
    if name not in work.engines or not moves.is_its_place(work, fact.node, report):
        return
    if engine is not None and report.incarnation > engine.incarnation:
        _adopt(work, name, report)
    parts.reported(work, fact.node, report)
    if report.part:
        report = _of_a_part(report)
    else:
        _version_reported(work, report)
        _kept(work, name, report)
    before = work.engines[name]
    transition(Case(work, name, fact, report))
    _returned(work, name, before)
    if work.engines[name].phase is before.phase and _concerns(before.intent, report):
        ask_again(work, name, reason="an open step is asked for again on its node's report")


def _of_a_part(report: EngineReport) -> EngineReport:
    """What becomes of the slot is for the head's agent to keep; of a further part it says that it is gone."""
    return replace(report, state="absent") if report.state in ("drained", "retired") else report


def _concerns(intent: Command | None, report: EngineReport) -> bool:
    """Whether the open step is asked of the node that reports."""
    return isinstance(intent, StartEngine | StopEngine) or (intent is not None and not report.part)


def _ask_head(work: Work, name: EngineName, node: NodeName) -> None:
    """Once each further part is known, the head's node says what is true of the whole."""
    engine = work.engines[name]
    if engine.phase not in (Phase.NEW, Phase.SILENT) or engine.node == node or not work.told(engine):
        return
    if work.meta.nodes[engine.node].asked is None:
        ask_report(work, engine.node, reason=f"every node with a part of {name} has reported")


def _returned(work: Work, name: EngineName, before: EngineState) -> None:
    """It is back in time: a move that waited for an approval is not needed any more."""
    now = work.engines[name]
    if before.phase is Phase.SILENT and now.phase not in (Phase.SILENT, Phase.STOPPING):
        waited = now.recovery
        if waited is not None and waited.incarnation == now.incarnation:
            recovery.finish(work, name, "cancelled")


def _kept(work: Work, name: EngineName, report: EngineReport) -> None:
    """What the agent keeps of an operator's word; one that lost its disk is told again."""
    kept: Then = report.state if report.state in ("drained", "retired") else "restart"
    if work.engines[name].kept != kept:
        work.put(name, kept=kept)


def _not_owned(work: Work, name: EngineName, fact: NodeUp) -> None:
    """Its node's agent does not list it any more. One that has ended is forgotten."""
    engine = work.engines[name]
    number = engine.nodes.index(fact.node)
    if engine.phase not in (Phase.NEW, *ENDED_FOR_GOOD):
        absent = EngineReport(engine=name, state="absent", part=number, parts=len(engine.nodes))
        transition(Case(work, name, fact, absent))
        return
    parts.settle(work, name, number, NOWHERE, gone=engine.incarnation)
    if set(work.engines[name].nodes) == {NOWHERE}:
        _forget(work, name)


def _forget(work: Work, name: EngineName) -> None:
    """It has left the job: nothing waits for it any more."""
    recovery.finish(work, name, "cancelled")
    boundary, sync = work.meta.boundary, work.meta.sync
    if boundary is not None and name in boundary.awaiting:
        awaiting = tuple(other for other in boundary.awaiting if other != name)
        work.learn(boundary=replace(boundary, awaiting=awaiting))
    if sync is not None and name in sync.pending:
        pending = tuple(other for other in sync.pending if other != name)
        work.learn(sync=replace(sync, pending=pending))
    del work.engines[name]


def _adopt(work: Work, name: EngineName, report: EngineReport) -> None:
    """The agent is ahead: the bus lost what was committed. Its incarnation is the one that counts."""
    work.fence(name, reason=f"its agent reports incarnation {report.incarnation}")
    work.put(
        name,
        phase=Phase.SILENT,
        incarnation=report.incarnation,
        intent=None,
        recovery=None,
        then="restart",
        retired_because=None,
    )
    work.count("adopted")


def _version_reported(work: Work, report: EngineReport) -> None:
    """After a rollback the job's version is the highest that anyone reports."""
    version, known = report.version, work.meta.version
    if version is None or work.meta.finished or known is None or version <= known:
        return
    newer = version.run > work.meta.run
    work.learn(run=max(work.meta.run, version.run))
    version_moved(work, version)
    if newer:  # its trainer's first word is among what was lost
        for name, engine in list(work.engines.items()):
            if engine.phase is Phase.SERVING and engine.version != version:
                enter(
                    work,
                    name,
                    Phase.STALE,
                    reason=f"run {version.run} began: {report.engine} holds {version}",
                )


def ask_again(work: Work, name: EngineName, *, reason: str) -> None:
    """Ask for the engine's open step once more, under a new id and with a new deadline."""
    match work.engines[name].intent:
        case StartEngine():
            order_start(work, name, reason=reason)
        case StopEngine(drain_s=drain_s):
            order_stop(work, name, reason=reason, drain_s=drain_s)
        case VerifyEngine():
            order_verify(work, name, reason=reason)
        case ProbeEngine():
            order_probe(work, name, reason=reason)
        case LoadWeights(version=version, uri=uri, digest=digest, sync=sync):
            weights = Weights(version=version, uri=uri, digest=digest)
            still = work.meta.sync
            order = still.order if still is not None and still.order.sync == sync else None
            order_load(work, name, weights, sync=order, reason=reason)
        case None:
            pass


def node_silent(work: Work, fact: NodeSilent) -> None:
    """Its engines are fenced; nothing is started on it before it speaks again."""
    record = work.meta.nodes.get(fact.node)
    if record is None or record.silent:
        return
    work.decisions.append(fact)
    if not engines_on(work, fact.node) and not moves.left_anything(work, fact.node):
        work.learn(nodes={node: known for node, known in work.meta.nodes.items() if node != fact.node})
        return
    silent = replace(record, silent=True, silent_since=work.now)
    work.learn(nodes={**work.meta.nodes, fact.node: silent})
    for name in engines_on(work, fact.node):
        transition(Case(work, name, fact))
    quiet, counted = moves.silence(work)
    if 2 * len(quiet) > counted:
        work.alarm("silence", f"{len(quiet)} of {counted} nodes are silent", reason="nothing is restarted")


def engines_on(work: Work, node: NodeName) -> list[EngineName]:
    return [name for name, engine in work.engines.items() if node in engine.nodes]


def ask_report(work: Work, node: NodeName, *, reason: str) -> None:
    """Ask the node's agent what is true."""
    record = work.meta.nodes[node]
    asked = work.decide(
        ReportRequested, reason=reason, node=node, deadline=work.after(work.settings.report_s)
    )
    work.learn(nodes={**work.meta.nodes, node: replace(record, asked=asked)})
