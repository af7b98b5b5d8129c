"""A job as people are shown it: the read model of `relight status` and the dashboard.

Pure: the committed state in, a value to print out.
"""

from collections.abc import Mapping, Sequence

import msgspec

from relight.events.ids import EngineName, JobName, NodeName
from relight.events.schema import Boundary, Meta, NodeRecord, Snapshot
from relight.events.values import Phase
from relight.events.version import Version
from relight.orchestrator.concerns import Concern, Seen, concerns
from relight.orchestrator.engine_views import EngineView, engine_view, recent
from relight.orchestrator.settings import Settings


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a job."""

    node: NodeName
    silent: bool
    reported: bool
    """Whether it has reported under this epoch."""
    asked_s: float | None
    """Seconds left for a report that it was asked for; none where none is open."""
    engines: int
    spares: int
    """How many more engines it can take."""
    devices_lost_on: tuple[str, ...]
    """Devices on which an engine was lost inside the restart window."""


class BoundaryView(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's open boundary."""

    boundary: int
    step: int
    exports: Version | None
    phase: str
    sync: str
    released: bool


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job at one moment of bus time."""

    job: JobName
    epoch: int
    commit: int
    holder: str | None
    """Who holds the lease; none where no orchestrator does."""
    lease_left_s: float | None
    behind: int
    """Facts that no commit has consumed yet, counted to 1,000."""
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
    trainer_waits_for: str | None
    """What keeps its boundary from being released; none where nothing does."""
    parked: int
    counters: Mapping[str, int]
    silent_nodes: tuple[NodeName, ...]
    serving: int
    """Engines that serve."""
    floor: int
    """How many shall serve."""
    restarts_allowed: int
    restart_window_s: float
    rolling: tuple[EngineName, ...]
    """Engines that are still to be restarted, one after the other."""
    concerns: tuple[Concern, ...]
    """What a person should look at, the worst first."""
    nodes: tuple[NodeView, ...]
    engines: tuple[EngineView, ...]


def job_view(job: JobName, snapshot: Snapshot, seen: Seen) -> JobView:
    """The job as `snapshot` has it, and as it was seen beside that."""
    meta = snapshot.meta or Meta(birth="")
    settings, now_ms = _settings(meta), seen.now_ms
    return JobView(
        job=job,
        epoch=snapshot.epoch,
        commit=snapshot.commit,
        holder=None if seen.holder is None else seen.holder.partition(":")[2],
        lease_left_s=seen.lease_left_s,
        behind=seen.behind,
        run=meta.run,
        version=meta.version,
        published=meta.published.version if meta.published else None,
        boundary=_boundary_view(meta.boundary) if meta.boundary else None,
        trainer_silent=meta.trainer_silent,
        finished=meta.finished,
        hold=meta.hold,
        mode=settings.mode,
        sync_waits_for=meta.sync.pending if meta.sync else (),
        trainer_waits_for=_trainer_waits_for(meta),
        parked=seen.parked,
        counters=meta.counters,
        silent_nodes=tuple(sorted(name for name, node in meta.nodes.items() if node.silent)),
        serving=sum(engine.phase is Phase.SERVING for engine in snapshot.engines.values()),
        floor=settings.floor,
        restarts_allowed=settings.restarts,
        restart_window_s=settings.restart_window_s,
        rolling=tuple(member.engine for member in meta.rolling),
        concerns=concerns(job, snapshot, settings, seen),
        nodes=tuple(
            _node_view(name, node, snapshot, settings, now_ms) for name, node in sorted(meta.nodes.items())
        ),
        engines=tuple(
            engine_view(name, engine, meta, settings, now_ms)
            for name, engine in sorted(snapshot.engines.items())
        ),
    )


def _settings(meta: Meta) -> Settings:
    """Those of the lease holder, as far as they are known here; the defaults where they cannot be read."""
    known = {name: meta.settings[name] for name in Settings.__struct_fields__ if name in meta.settings}
    try:
        return msgspec.convert(known, Settings)
    except (msgspec.ValidationError, ValueError):
        return Settings()


def _trainer_waits_for(meta: Meta) -> str | None:
    boundary = meta.boundary
    if boundary is None or meta.trainer_silent or meta.finished:
        return None
    if meta.sync and meta.sync.pending:
        return f"{_listed(meta.sync.pending)} to load {meta.sync.order.version}"
    if boundary.released or boundary.sync != "all":
        return None
    if boundary.awaiting:
        return f"{_listed(boundary.awaiting)} to be routed at {boundary.exports}"
    return "the orchestrator's word"


def _listed(names: Sequence[EngineName]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _boundary_view(boundary: Boundary) -> BoundaryView:
    return BoundaryView(
        boundary=boundary.boundary,
        step=boundary.step,
        exports=boundary.exports,
        phase=boundary.phase,
        sync=boundary.sync,
        released=boundary.released,
    )


def _node_view(
    name: NodeName, node: NodeRecord, snapshot: Snapshot, settings: Settings, now_ms: int
) -> NodeView:
    return NodeView(
        node=name,
        silent=node.silent,
        reported=node.reported == snapshot.epoch,
        asked_s=(node.asked.deadline - now_ms) / 1000.0 if node.asked else None,
        engines=sum(name in engine.nodes for engine in snapshot.engines.values()),
        spares=node.spares,
        devices_lost_on=tuple(
            device for device, times in sorted(node.worn.items()) if recent(times, settings, now_ms)
        ),
    )
