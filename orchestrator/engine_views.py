"""One engine as people are shown it. Pure."""

from collections.abc import Iterable

import msgspec

from relight.events.ids import EngineName, NodeName, RecoveryId
from relight.events.schema import Command, EngineState, Meta
from relight.events.values import Phase, Phases
from relight.events.version import Version
from relight.orchestrator.core import recovery
from relight.orchestrator.core.moves import no_spare
from relight.orchestrator.settings import Settings


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """The step that is open for an engine."""

    decision: str
    """The decision's type."""
    id: str
    reason: str
    left_s: float | None
    """Seconds to its deadline; negative once it has passed; none where it is withheld."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One slot as the orchestrator has committed it."""

    engine: EngineName
    node: NodeName
    parts: tuple[NodeName, ...]
    """Further nodes of an engine over several."""
    phase: str
    incarnation: int
    version: Version | None
    route: str | None
    """Address that clients may call; none while it is fenced."""
    intent: Intent | None
    recovery: RecoveryId | None
    approved: bool
    """False while its recovery waits for an operator."""
    why: str | None
    """Why it is being recovered, or was retired, or waits for another node."""
    for_s: float | None
    """Seconds since the recovery began."""
    backoff_s: float | None
    """Seconds until it may start again; none where it may now."""
    since_s: float | None
    """Seconds since it entered its phase; none where that is unknown."""
    restarts: int
    """Restarts inside the window, those that are allowed in it being `restarts_allowed` of the job."""
    passed: Phases | None
    """Milliseconds of the phases that its recovery has passed."""
    then: str
    """What becomes of the slot once its stop is proven: `restart`, `drained` or `retired`."""
    suspected: bool
    """A client's call failed there and nobody has looked yet."""
    left: tuple[str, ...]
    """Older incarnations that are not proven gone, each with its node."""


def engine_view(
    name: EngineName, engine: EngineState, meta: Meta, settings: Settings, now_ms: int
) -> EngineView:
    """The slot called `name` at a moment of bus time."""
    under_way = engine.recovery
    return EngineView(
        engine=name,
        node=engine.node,
        parts=engine.nodes[1:],
        phase=engine.phase.value,
        incarnation=engine.incarnation,
        version=engine.version,
        route=engine.route.address if engine.route else None,
        intent=_intent(engine.intent, now_ms) if engine.intent else None,
        recovery=under_way.id if under_way else None,
        approved=under_way is None or under_way.approved,
        why=_why(engine, meta),
        for_s=(now_ms - under_way.began) / 1000.0 if under_way else None,
        backoff_s=_backoff_s(engine, now_ms),
        since_s=(now_ms - engine.since) / 1000.0 if engine.since else None,
        restarts=recent(engine.restarts, settings, now_ms),
        passed=recovery.phases(under_way) if under_way else None,
        then=engine.then,
        suspected=engine.suspected,
        left=tuple(f"{name}.{old.incarnation} on {old.node}" for old in engine.left),
    )


def _why(engine: EngineState, meta: Meta) -> str | None:
    why = engine.recovery.why if engine.recovery else engine.retired_because
    return "; ".join(filter(None, (why, no_spare(meta, engine)))) or None


def _backoff_s(engine: EngineState, now_ms: int) -> float | None:
    waits_ms = engine.not_before - now_ms if engine.phase is Phase.BACKOFF else 0
    return waits_ms / 1000.0 if waits_ms > 0 else None


def _intent(order: Command, now_ms: int) -> Intent:
    return Intent(
        decision=type(order).__name__,
        id=order.id,
        reason=order.reason,
        left_s=None if order.dry_run else (order.deadline - now_ms) / 1000.0,
    )


def recent(times: Iterable[int], settings: Settings, now_ms: int) -> int:
    """How many of these bus times lie inside the restart window."""
    return sum(at > now_ms - settings.restart_window_s * 1000 for at in times)
