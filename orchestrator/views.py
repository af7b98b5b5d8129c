"""A job as people are shown it: the read model of `relight status` and the dashboard.

Pure: the committed state in, a value to print out.
"""

from collections.abc import Mapping

import msgspec

from relight.events.ids import EngineName, JobName, NodeName, RecoveryId
from relight.events.schema import Boundary, Command, EngineState, Meta, Snapshot
from relight.events.values import Phase
from relight.events.version import Version


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
    """Why it is being recovered, or was retired."""
    for_s: float | None
    """Seconds since the recovery began."""
    backoff_s: float | None
    """Seconds until it may start again; none where it may now."""


class BoundaryView(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's open boundary."""

    boundary: int
    step: int
    exports: Version | None
    phase: str
    sync: str


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job at one moment of bus time."""

    job: JobName
    epoch: int
    commit: int
    holder: str | None
    """Who holds the lease; none where no orchestrator does."""
    run: int
    version: Version | None
    published: Version | None
    boundary: BoundaryView | None
    trainer_silent: bool
    finished: bool
    hold: bool
    mode: str
    """`act`, `approve` or `observe`: the lease holder's setting."""
    sync_waits_for: tuple[EngineName, ...]
    """Members of the open sync that have neither loaded nor left."""
    parked: int
    counters: Mapping[str, int]
    silent_nodes: tuple[NodeName, ...]
    engines: tuple[EngineView, ...]


def job_view(job: JobName, snapshot: Snapshot, *, holder: str | None, parked: int, now_ms: int) -> JobView:
    """The job as `snapshot` has it; `holder` is the lease's value, `now_ms` bus time."""
    meta = snapshot.meta or Meta(birth="")
    return JobView(
        job=job,
        epoch=snapshot.epoch,
        commit=snapshot.commit,
        holder=None if holder is None else holder.partition(":")[2],
        run=meta.run,
        version=meta.version,
        published=meta.published.version if meta.published else None,
        boundary=_boundary_view(meta.boundary) if meta.boundary else None,
        trainer_silent=meta.trainer_silent,
        finished=meta.finished,
        hold=meta.hold,
        mode=meta.settings.get("mode", "act"),
        sync_waits_for=meta.sync.pending if meta.sync else (),
        parked=parked,
        counters=meta.counters,
        silent_nodes=tuple(sorted(name for name, node in meta.nodes.items() if node.silent)),
        engines=tuple(
            _engine_view(name, engine, now_ms) for name, engine in sorted(snapshot.engines.items())
        ),
    )


def _boundary_view(boundary: Boundary) -> BoundaryView:
    return BoundaryView(
        boundary=boundary.boundary,
        step=boundary.step,
        exports=boundary.exports,
        phase=boundary.phase,
        sync=boundary.sync,
    )


def _engine_view(name: EngineName, engine: EngineState, now_ms: int) -> EngineView:
    recovery = engine.recovery
    return EngineView(
        engine=name,
        node=engine.node,
        phase=engine.phase.value,
        incarnation=engine.incarnation,
        version=engine.version,
        route=engine.route.address if engine.route else None,
        intent=_intent(engine.intent, now_ms) if engine.intent else None,
        recovery=recovery.id if recovery else None,
        approved=recovery is None or recovery.approved,
        why=recovery.why if recovery else engine.retired_because,
        for_s=(now_ms - recovery.began) / 1000.0 if recovery else None,
        backoff_s=_backoff_s(engine, now_ms),
    )


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
