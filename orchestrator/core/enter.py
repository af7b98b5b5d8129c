"""What entering a phase decides. Leaving a phase decides nothing."""

from collections.abc import Callable

from relight.events.decisions import (
    EngineRetired,
    ProbeEngine,
    RouteAdded,
    StartEngine,
    StopEngine,
    VerifyEngine,
)
from relight.events.ids import EngineName
from relight.events.schema import EngineState, Route
from relight.events.values import Canary, Phase, Weights
from relight.orchestrator.core import budget, devices, floor, parts, recovery
from relight.orchestrator.core.job import Work


def enter(work: Work, name: EngineName, phase: Phase, *, reason: str) -> None:
    """Put the engine into `phase` and take the decisions that come with it."""
    work.put(name, phase=phase, since=work.now, alarmed=False)
    _ENTER[phase](work, name, reason)


def _starting(work: Work, name: EngineName, reason: str) -> None:
    if not may_start(work, name):
        work.put(name, phase=Phase.BACKOFF)
        return
    engine = work.engines[name]
    restarts = budget.inside_window(work, engine)
    if engine.incarnation > 0 and (engine.recovery is None or engine.recovery.budgeted):
        restarts = (*restarts, work.now)
    work.put(
        name,
        incarnation=engine.incarnation + 1,
        restarts=restarts,
        version=None,
        digest=None,
        then="restart",
        kept="restart",
        intent=None,
    )
    order_start(work, name, reason=reason)


def order_start(work: Work, name: EngineName, *, reason: str) -> None:
    """Ask for the incarnation as it stands, on the snapshot of the job's version where one is wanted."""
    engine = work.engines[name]
    work.order(
        StartEngine,
        name,
        reason=reason,
        node=engine.node,
        parts=engine.nodes[1:],
        head=_host(work, engine),
        weights=_weights_of_a_start(work, engine),
        avoid=devices.worn(work, engine.nodes),
        deadline=work.after(_start_s(work, engine)),
    )


def _host(work: Work, engine: EngineState) -> str:
    """Where the other parts meet the head."""
    record = work.meta.nodes.get(engine.node)
    return (record.host if record else "") if engine.parts else ""


def _weights_of_a_start(work: Work, engine: EngineState) -> Weights | None:
    """Asked again, parts that begin late begin with what the others have begun with."""
    asked = engine.intent
    if engine.parts and isinstance(asked, StartEngine) and not asked.dry_run:
        return asked.weights
    return weights_to_start_on(work, engine)


def snapshot_to_use(work: Work) -> Weights | None:
    """Published weights of the job's version, where recoveries may use them."""
    published = work.meta.published
    if work.settings.recover_at == "boundary" or published is None:
        return None
    return published if published.version == work.meta.version else None


def weights_to_start_on(work: Work, engine: EngineState) -> Weights | None:
    """Published weights of the job's version, where this engine is to be started on them."""
    published = work.meta.published
    if not engine.starts_only:
        published = snapshot_to_use(work)
    if published is None or published.version != work.meta.version:
        return None
    return published if published.digest != engine.unreadable else None


def _start_s(work: Work, engine: EngineState) -> float:
    settings = work.settings
    if engine.start_s is None:
        return settings.start_s
    return min(settings.start_s, max(settings.start_least_s, settings.start_factor * engine.start_s))


def may_start(work: Work, name: EngineName) -> bool:
    """Each node of it speaks, the job goes on, and the start limits have room."""
    engine = work.engines[name]
    if not work.told(engine) or work.meta.finished or work.meta.hold:
        return False
    starting = [other for key, other in work.engines.items() if key != name and other.phase is Phase.STARTING]
    here = max(sum(node in other.nodes for other in starting) for node in engine.nodes)
    return here < work.settings.starts_per_node and len(starting) < work.settings.starts_per_job


def _stale(work: Work, name: EngineName, reason: str) -> None:
    work.fence(name, reason=reason, planned=True)
    work.put(name, intent=None)


def _syncing(work: Work, name: EngineName, reason: str) -> None:
    recovery.mark(work, name, "boundary")
    work.put(name, version=None, digest=None)


def _verifying(work: Work, name: EngineName, reason: str) -> None:
    order_verify(work, name, reason=reason)


def order_verify(work: Work, name: EngineName, *, reason: str) -> None:
    """Ask for the proof of the version that the engine holds."""
    engine = work.engines[name]
    assert engine.version is not None
    work.order(
        VerifyEngine,
        name,
        reason=reason,
        version=engine.version,
        digest=engine.digest,
        reference=_reference(work, engine),
        tolerance=work.settings.tolerance,
        deadline=work.after(work.settings.verify_s),
    )


def _reference(work: Work, engine: EngineState) -> Canary | None:
    """The canary of the previous incarnation, or of a peer, at the version that is to be proven."""
    if engine.reference is not None and engine.reference.version == engine.version:
        return engine.reference.canary
    for known in work.meta.references:
        if known.version == engine.version:
            return known.canary
    return None


def _serving(work: Work, name: EngineName, reason: str) -> None:
    engine = work.engines[name]
    assert engine.address is not None and engine.version is not None
    work.put(name, route=Route(address=engine.address, version=engine.version))
    order_route(work, name, reason=reason)


def order_route(work: Work, name: EngineName, *, reason: str) -> None:
    """Say the route as it stands."""
    route = work.engines[name].route
    assert route is not None
    work.put(name, suspected=False)
    work.command(RouteAdded, name, reason=reason, address=route.address, version=route.version)


def order_probe(work: Work, name: EngineName, *, reason: str) -> None:
    """Ask the agent to look at the engine now."""
    deadline = work.after(work.settings.probe_s)
    work.order(ProbeEngine, name, reason=reason, deadline=deadline)


def _draining(work: Work, name: EngineName, reason: str) -> None:
    work.fence(name, reason=reason, drain_s=work.settings.drain_s, planned=True)
    order_stop(work, name, reason=reason, drain_s=work.settings.drain_s)


def _silent(work: Work, name: EngineName, reason: str) -> None:
    work.fence(name, reason=reason)
    work.put(name, intent=None)


def _stopping(work: Work, name: EngineName, reason: str) -> None:
    engine = work.engines[name]
    if engine.recovery is None and engine.then == "restart" and not work.meta.finished:
        recovery.begin(work, name, why=reason)
    work.fence(name, reason=reason, planned=_is_asked_for(work.engines[name]))
    order_stop(work, name, reason=reason)


def _is_asked_for(engine: EngineState) -> bool:
    """Whether it ends because somebody wants it to, and not because it was lost."""
    if engine.recovery is not None:
        return not engine.recovery.budgeted
    return engine.then != "restart"


def order_stop(work: Work, name: EngineName, *, reason: str, drain_s: float = 0.0) -> None:
    """Ask for the incarnation's end and the proof of it, wherever something of it may be."""
    engine = work.engines[name]
    first, *others = parts.to_stop(engine)
    work.order(
        StopEngine,
        name,
        reason=reason,
        node=first.node,
        processes=first.processes,
        others=tuple(others),
        drain_s=drain_s,
        then=engine.then,
        deadline=work.after(drain_s + work.settings.stop_s),
    )


def _backoff(work: Work, name: EngineName, reason: str) -> None:
    engine = work.engines[name]
    work.put(name, intent=None, not_before=work.now + budget.wait_ms(work, name, engine))


def _stopped(work: Work, name: EngineName, reason: str) -> None:
    work.fence(name, reason=reason)
    work.put(name, intent=None, then="drained")
    recovery.finish(work, name, "cancelled")


def _retired(work: Work, name: EngineName, reason: str) -> None:
    engine = work.engines[name]
    work.fence(name, reason=reason)
    because = (
        engine.retired_because
        or f"{reason}; {len(budget.inside_window(work, engine))} restarts in the window"
    )
    work.put(name, intent=None, then="retired", retired_because=because)
    recovery.finish(work, name, "retired")
    work.command(EngineRetired, name, reason=because)
    floor.alarm(work, reason=f"{name} was retired")


def _new(work: Work, name: EngineName, reason: str) -> None:
    raise AssertionError(f"{name}: nothing returns to NEW")


_ENTER: dict[Phase, Callable[[Work, EngineName, str], None]] = {
    Phase.NEW: _new,
    Phase.STARTING: _starting,
    Phase.STALE: _stale,
    Phase.SYNCING: _syncing,
    Phase.VERIFYING: _verifying,
    Phase.SERVING: _serving,
    Phase.DRAINING: _draining,
    Phase.SILENT: _silent,
    Phase.STOPPING: _stopping,
    Phase.BACKOFF: _backoff,
    Phase.STOPPED: _stopped,
    Phase.RETIRED: _retired,
}
