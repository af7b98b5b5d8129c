"""What is learned from a fact about an engine, before its next phase is entered."""

from collections.abc import Callable
from typing import Any

from relight.events.decisions import LoadWeights, ProbeEngine, StartEngine, StopEngine, VerifyEngine
from relight.events.facts import (
    DrainRequested,
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    NodeUp,
    OfPart,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
    RouteSuspected,
    StartFailed,
    StopFailed,
    WeightsFailed,
    WeightsLoaded,
)
from relight.events.schema import EngineState, Then
from relight.events.values import Phase
from relight.events.version import BASE
from relight.orchestrator.core import budget, devices, parts, proof, recovery, rolling
from relight.orchestrator.core.devices import Device
from relight.orchestrator.core.enter import order_probe, order_stop
from relight.orchestrator.core.guards import Case, is_synced_now


def absorb(case: Case) -> None:
    """Change the engine's (and the job's) records by what the fact says."""
    learn = _LEARN.get(type(case.fact))
    if learn is not None:
        learn(case, case.fact)


def _dead(case: Case, fact: EngineDead) -> None:
    if case.engine.phase not in (Phase.STOPPING, Phase.BACKOFF, Phase.STOPPED, Phase.RETIRED):
        why = _death(fact) + _whose(case, fact)
        recovery.begin(case.work, case.name, why=why, detect_ms=fact.detect_ms)
        devices.failed(case.work, case.name, _device(case, fact), why=why)


def _whose(case: Case, fact: OfPart) -> str:
    """Of an engine over several nodes: where it was seen, for people."""
    return f" at {parts.speaker(case.engine, fact)}" if case.engine.parts else ""


def _device(case: Case, fact: EngineDead | StartFailed) -> Device:
    return Device(parts.speaker(case.engine, fact), fact.device)


def _restart(case: Case, fact: RestartRequested) -> None:
    if case.engine.phase is Phase.SERVING and case.work.meta.hold:
        rolling.add(case.work, case.name)
    elif case.engine.phase in (Phase.STARTING, Phase.STALE, Phase.SYNCING, Phase.VERIFYING, Phase.SERVING):
        why = "an operator asked for a restart"
        recovery.begin(case.work, case.name, why=why, by="operator")
    elif case.engine.phase is Phase.BACKOFF:  # its start is what is asked for, and need not wait
        case.work.put(case.name, not_before=0)


def _started(case: Case, fact: EngineStarted) -> None:
    engine, node = case.engine, parts.speaker(case.engine, fact)
    if engine.phase is not Phase.STARTING:
        return
    if node == engine.node:
        case.work.put(
            case.name,
            address=fact.address,
            processes=fact.processes,
            version=fact.weights or BASE,
            digest=_started_on(engine),
            start_s=fact.seconds or engine.start_s,
            starts_only=_starts_only(case, fact),
        )
    else:
        parts.started(case.work, case.name, node, fact.processes)
    if case.engine.version is not None and parts.stand(case.engine):
        recovery.mark(case.work, case.name, "start")
        case.work.put(case.name, intent=None)


def _starts_only(case: Case, fact: EngineStarted) -> bool:
    """Whether only a start brings it published weights. One that ignored them then is not started again."""
    named = _started_on(case.engine) is not None
    if fact.reloads is not False:
        return False
    if case.engine.starts_only and named and fact.weights is None:
        detail = (
            f"{case.name} reloads wrongly, and its command has no {{weights}}: no published weights reach it"
        )
        case.work.alarm("reload", detail, reason="it was started on weights and does not hold them")
        return False
    if not case.engine.starts_only:
        detail = f"{case.name} does not compute the same after a reload: it is started on weights instead"
        case.work.alarm("reload", detail, reason="its agent has tried a reload of its own weights")
    return True


def _stopped(case: Case, fact: EngineStopped) -> None:
    parts.proven_gone(case.work, case.name, fact.node)
    engine = case.engine
    asked = engine.intent if isinstance(engine.intent, StopEngine) else None
    answered = asked is not None and fact.answers in (None, asked.id) and fact.node == engine.node
    if asked is not None and answered:
        case.work.put(case.name, kept=asked.then)
    if parts.remaining(engine):
        _await_others(case)
        return
    if answered:
        case.work.put(case.name, intent=None)
    if engine.phase in (Phase.STOPPING, Phase.DRAINING):
        recovery.mark(case.work, case.name, "stop")
        case.work.put(case.name, intent=None, processes=(), address=None)


def _await_others(case: Case) -> None:
    """Without a head nothing drains any more: the other parts are stopped at once."""
    engine = case.engine
    if engine.phase is Phase.DRAINING and engine.gone == engine.incarnation:
        order_stop(case.work, case.name, reason="its head is gone")


def _start_failed(case: Case, fact: StartFailed) -> None:
    parts.proven_gone(case.work, case.name, parts.speaker(case.engine, fact))
    if case.engine.phase is Phase.STARTING:
        why = f"its start failed: {fact.cause}" + _whose(case, fact)
        recovery.go_on(case.work, case.name, why=why)
        devices.failed(case.work, case.name, _device(case, fact), why=why)
        if fact.cause == "weights":
            detail = f"{case.name} cannot be started on published weights: {fact.detail}"
            case.work.alarm("weights", detail, reason="it is started without them")
            case.work.put(case.name, unreadable=_started_on(case.engine))
    if parts.remaining(case.engine):
        if not fact.retryable and case.engine.then == "restart":
            because = f"its start failed for good{_whose(case, fact)}: {fact.cause}"
            case.work.put(case.name, retired_because=because)
    elif case.engine.phase in (Phase.STARTING, Phase.STOPPING):
        case.work.put(case.name, intent=None, processes=(), address=None)


def _failed(case: Case, fact: WeightsFailed) -> None:
    if case.engine.phase not in (Phase.SYNCING, Phase.SERVING, Phase.VERIFYING):
        return
    case.work.put(case.name, intent=None, not_before=budget.retry_at(case.work))
    if fact.touched:
        detail = f"{case.name}.{fact.incarnation} is not at {fact.version}: {fact.error}"
        case.work.alarm("weights", detail, reason="it is restarted, whatever it holds now")
        recovery.begin(case.work, case.name, why=f"its weights failed: {fact.error}")
        return
    detail = f"{case.name} cannot take {fact.version}: {fact.error}"
    case.work.alarm("weights", detail, reason="the weights were refused before the engine was touched")


def _drain(case: Case, fact: DrainRequested) -> None:
    if case.engine.phase is not Phase.RETIRED:
        _end_wanted(case, then="drained")


def _retire(case: Case, fact: RetireRequested) -> None:
    case.work.put(case.name, retired_because="an operator asked for it")
    _end_wanted(case, then="retired")


def _end_wanted(case: Case, *, then: Then) -> None:
    """The operator's word ends a recovery, and a stop under way tells the agent what is to be kept."""
    case.work.put(case.name, then=then, wished=True)
    recovery.finish(case.work, case.name, "cancelled")
    if case.engine.phase is Phase.STOPPING:
        order_stop(case.work, case.name, reason="an operator said what becomes of it")


def _released(case: Case, fact: ReleaseRequested) -> None:
    case.work.put(case.name, then="restart", wished=False, retired_because=None, restarts=(), not_before=0)
    if case.engine.phase is Phase.STOPPING:
        order_stop(case.work, case.name, reason="an operator took it back in")


def _suspected(case: Case, fact: RouteSuspected) -> None:
    if case.engine.phase is not Phase.SERVING:
        return
    case.work.put(case.name, suspected=True)
    if case.engine.intent is None:
        order_probe(case.work, case.name, reason=f"a client's call failed there: {fact.error}")


def _death(fact: EngineDead) -> str:
    how = f"signal {fact.signal}" if fact.signal is not None else f"exit code {fact.exit_code}"
    told = how if fact.cause.value in ("exit", "signal", "oom") else first_line(fact.detail) or how
    return f"{fact.cause.value} ({told})"


def first_line(said: str) -> str:
    """What a fact says, without the lines of an engine's log that may stand below it."""
    return said.partition("\n")[0]


def _started_on(engine: EngineState) -> str | None:
    start = engine.intent
    return start.weights.digest if isinstance(start, StartEngine) and start.weights else None


def _stop_failed(case: Case, fact: StopFailed) -> None:
    if case.engine.phase in (Phase.STOPPING, Phase.DRAINING) and not case.engine.alarmed:
        detail = (
            f"{case.name}.{case.engine.incarnation} is not proven gone{_whose(case, fact)}:"
            f" {fact.cause} {fact.detail}".strip()
        )
        case.work.alarm("stop", detail, reason="no replacement starts before the old one is proven gone")
        case.work.put(case.name, alarmed=True)


def _loaded(case: Case, fact: WeightsLoaded) -> None:
    engine = case.engine
    if engine.phase not in (Phase.SYNCING, Phase.SERVING):
        return
    if not isinstance(engine.intent, LoadWeights) or engine.intent.version != fact.version:
        return
    recovery.mark(case.work, case.name, "sync")
    case.work.put(case.name, intent=None, version=fact.version, digest=fact.digest)


def _healthy(case: Case, fact: Healthy) -> None:
    work, engine = case.work, case.engine
    asked = VerifyEngine if engine.phase is Phase.VERIFYING else ProbeEngine
    if engine.phase not in (Phase.VERIFYING, Phase.SERVING) or not isinstance(engine.intent, asked):
        return
    if fact.answers != engine.intent.id:  # the proof of something that was asked before
        return
    if not work.told(engine):
        return
    if fact.version != engine.version:
        proof.mislabelled(work, case.name, fact)
        return
    if engine.phase is Phase.VERIFYING:
        recovery.mark(work, case.name, "verify")
        if fact.unproven is not None:
            detail = f"{case.name}.{fact.incarnation} at {fact.version}: {fact.unproven}"
            work.alarm("unproven", detail, reason="it is routed by the digest of what was handed over alone")
    work.put(case.name, intent=None)
    if not is_synced_now(case):  # what is written now is of no version
        proof.weigh(work, case.name, fact)


def _seen(case: Case, fact: NodeUp) -> None:
    """An agent's report: where it listens and what it holds, for phases that take the agent's word."""
    report = case.report
    if report is None or report.part or case.engine.phase not in (Phase.NEW, Phase.SILENT):
        return
    case.work.put(
        case.name,
        incarnation=max(report.incarnation, case.engine.incarnation),
        address=report.address,
        version=report.version,
        digest=case.engine.digest if report.version == case.engine.version else None,
        processes=report.processes or case.engine.processes,
    )


_LEARN: dict[type, Callable[[Case, Any], None]] = {
    DrainRequested: _drain,
    EngineDead: _dead,
    EngineStarted: _started,
    EngineStopped: _stopped,
    Healthy: _healthy,
    NodeUp: _seen,
    ReleaseRequested: _released,
    RestartRequested: _restart,
    RetireRequested: _retire,
    RouteSuspected: _suspected,
    StartFailed: _start_failed,
    StopFailed: _stop_failed,
    WeightsFailed: _failed,
    WeightsLoaded: _loaded,
}
