"""What a person should look at in a job, from its committed state. Pure.

Each concern has a kind of a fixed set, says of whom it is and since when, and names the command that ends
it, where there is one. Nothing here is decided: what the orchestrator does about it stands in the streams.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from relight.events.ids import EngineName, JobName
from relight.events.schema import EngineState, Meta, Snapshot
from relight.events.values import Phase
from relight.orchestrator.core.timers import what_brings_weights
from relight.orchestrator.settings import Settings

Level = Literal["alarm", "look", "note"]
_ORDER: tuple[Level, ...] = ("alarm", "look", "note")


class Concern(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to look at."""

    level: Level
    """`alarm`: somebody must act. `look`: it may pass by itself. `note`: somebody wanted it so."""
    kind: str
    of: str | None = None
    """The engine or node it is of; none: the job."""
    text: str
    for_s: float | None = None
    """Seconds it has lasted, where that is known."""
    do: str | None = None
    """The command that ends it."""


class Seen(NamedTuple):
    """What is true beside the state, at one moment."""

    now_ms: int
    """Bus time."""
    holder: str | None = None
    """The lease's value."""
    lease_left_s: float | None = None
    parked: int = 0
    behind: int = 0
    """Facts that no commit has consumed yet."""
    stamp: str | None = None
    """The server's; none where it was not asked for."""


class _Job(NamedTuple):
    name: JobName
    meta: Meta
    settings: Settings
    seen: Seen

    def since(self, at_ms: int) -> float | None:
        """Seconds since a bus time; none where that is 0."""
        return (self.seen.now_ms - at_ms) / 1000.0 if at_ms else None


def concerns(name: JobName, snapshot: Snapshot, settings: Settings, seen: Seen) -> tuple[Concern, ...]:
    """What to look at, the worst first."""
    job = _Job(name, snapshot.meta or Meta(birth=""), settings, seen)
    found = [*_of_job(job, snapshot)]
    for engine, state in sorted(snapshot.engines.items()):
        found += _of_engine(engine, state, job)
    return tuple(sorted(found, key=lambda concern: _ORDER.index(concern.level)))


def _of_job(job: _Job, snapshot: Snapshot) -> Iterator[Concern]:
    meta, seen = job.meta, job.seen
    if seen.holder is None and not meta.finished:
        text, do = "no orchestrator holds it: nothing is decided", f"relight orchestrate --job {job.name}"
        yield Concern(level="alarm", kind="orchestrator", text=text, do=do)
    if snapshot.meta is None:
        yield Concern(level="note", kind="empty", text="nothing has been committed on this bus")
        return
    if seen.stamp is not None and meta.bus != seen.stamp:
        text = "its state was written on another server: its routes are void until they are proven anew"
        yield Concern(level="alarm", kind="bus", text=text)
    yield from _floor(job, snapshot)
    if meta.trainer_silent:
        text = f"run {meta.run} of the trainer is silent: its boundary and open sync are void"
        yield Concern(level="alarm", kind="trainer", text=text)
    for name, node in sorted(meta.nodes.items()):
        if node.silent:
            text, for_s = "silent: its engines are fenced", job.since(node.silent_since)
            yield Concern(level="alarm", kind="node", of=name, text=text, for_s=for_s)
    if seen.parked:
        text = f"{seen.parked} entries that nobody could decode are parked"
        yield Concern(level="look", kind="parked", text=text)
    yield from _kept_back(job)


def _floor(job: _Job, snapshot: Snapshot) -> Iterator[Concern]:
    serving = sum(engine.phase is Phase.SERVING for engine in snapshot.engines.values())
    floor, meta = job.settings.floor, job.meta
    if serving < floor and not meta.finished and (meta.below_floor or meta.floor_alarmed):
        yield Concern(
            level="alarm" if meta.floor_alarmed else "look",
            kind="floor",
            text=f"{serving} engines serve, fewer than the floor of {floor}",
            for_s=job.since(meta.below_floor),
        )


def _kept_back(job: _Job) -> Iterator[Concern]:
    if job.meta.hold:
        text, do = "on hold: nothing is done to its engines", f"relight release --job {job.name}"
        yield Concern(level="note", kind="hold", text=text, do=do)
    if job.settings.mode == "observe":
        text = "only observed: what is decided is not done"
        yield Concern(level="note", kind="observe", text=text)
    if job.settings.mode == "approve":
        text = "each recovery waits for an approval"
        yield Concern(level="note", kind="approve", text=text)


def _of_engine(name: EngineName, engine: EngineState, job: _Job) -> Iterator[Concern]:
    for_s = job.since(engine.since)
    if engine.recovery and not engine.recovery.approved:
        yield Concern(
            level="alarm",
            kind="approval",
            of=name,
            text=f"its recovery waits for an approval: {engine.recovery.why}",
            for_s=job.since(engine.recovery.began),
            do=f"relight approve {engine.recovery.id} --job {job.name}",
        )
    if engine.phase in (Phase.RETIRED, Phase.STOPPED):
        yield Concern(
            level="note" if engine.wished or not engine.retired_because else "alarm",
            kind=engine.phase.value.lower(),
            of=name,
            text=engine.retired_because or "an operator took it out",
            for_s=for_s,
            do=f"relight release {name} --job {job.name}",
        )
    elif engine.phase is Phase.STALE and not job.meta.finished:
        text = f"stale: waits for {what_brings_weights(job.meta)}"
        yield Concern(
            level="alarm" if engine.alarmed else "look", kind="stale", of=name, text=text, for_s=for_s
        )
    elif engine.phase is Phase.STOPPING and engine.alarmed:
        text = "it is not proven gone: no replacement starts before"
        yield Concern(level="alarm", kind="stop", of=name, text=text, for_s=for_s)
    yield from _unanswered(name, engine, job)


def _unanswered(name: EngineName, engine: EngineState, job: _Job) -> Iterator[Concern]:
    step = engine.intent
    if step is not None and not step.dry_run and step.deadline < job.seen.now_ms:
        text = f"{type(step).__name__} is overdue"
        yield Concern(level="look", kind="overdue", of=name, text=text, for_s=job.since(step.deadline))
    if engine.suspected:
        text = "a client's call failed there and nobody has looked yet"
        yield Concern(level="look", kind="suspected", of=name, text=text)
    for old in engine.left:
        text = f"incarnation {old.incarnation} is not proven gone from {old.node}"
        yield Concern(level="look", kind="left", of=name, text=text)
