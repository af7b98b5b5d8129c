"""What a job may be, and what a step may do, by the words of the design alone: limits, waits, wishes.

Each gives None, or what is broken in one line.
"""

from collections.abc import Iterator
from typing import Any

from relight.events.decisions import (
    BoundaryReleased,
    LoadWeights,
    RouteFenced,
    StartEngine,
    StopEngine,
    VerifyEngine,
)
from relight.events.facts import (
    DrainRequested,
    JobFinished,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
    SafeBoundary,
)
from relight.events.ids import EngineName
from relight.events.values import Phase
from relight.orchestrator.core.job import Job, Step

LATE_MS = 5000
"""What passes between a deadline and its effect, at most, while somebody decides."""


def of_step(before: Job, heard: Any, done: Step) -> str | None:
    """What a step of the core breaks by itself."""
    return (
        _older_run(before, heard, done)
        or _held(before, heard, done)
        or _taken_out(before, heard, done)
        or _released(before, done)
    )


def _older_run(before: Job, heard: Any, done: Step) -> str | None:
    """S9: words of an older run neither open nor close a boundary, nor end the job."""
    if not isinstance(heard, SafeBoundary | JobFinished) or heard.run >= before.meta.run:
        return None
    if (_opened(before), before.meta.finished) == (_opened(done.job), done.job.meta.finished):
        return None
    return f"S9: a word of run {heard.run} has an effect after run {before.meta.run} has begun"


def _opened(job: Job) -> tuple[int, int, bool] | None:
    boundary = job.meta.boundary
    return (boundary.run, boundary.boundary, boundary.refused) if boundary is not None else None


def _held(before: Job, heard: Any, done: Step) -> str | None:
    """A job on hold: what is decided of its engines is not to be done, and who serves goes on, whatever an
    operator asks for; its trainer goes on.
    """
    if not (before.meta.hold and done.job.meta.hold):
        return None
    if isinstance(heard, DrainRequested | RestartRequested | RetireRequested):
        for each in done.decisions:
            if isinstance(each, RouteFenced) and not each.dry_run:
                return f"hold: {type(heard).__name__} takes {each.engine}.{each.incarnation} from its callers"
    for each in done.decisions:
        if isinstance(each, StartEngine | StopEngine | VerifyEngine | LoadWeights) and not each.dry_run:
            serves = before.engines[each.engine].phase is Phase.SERVING
            if not (serves and isinstance(each, LoadWeights)):
                name = f"{each.engine}.{each.incarnation}"
                return f"hold: {type(each).__name__} of {name} is to be obeyed while the job is on hold"
    return None


def _taken_out(before: Job, heard: Any, done: Step) -> str | None:
    """What an operator took out stays out until it is released."""
    if isinstance(heard, ReleaseRequested):
        return None
    for each in done.decisions:
        if isinstance(each, StartEngine):
            engine = before.engines.get(each.engine)
            if engine is not None and engine.then != "restart" and each.incarnation > engine.incarnation:
                name = f"{each.engine}.{each.incarnation}"
                return f"L1: {name} is started, and an operator had it {engine.then}"
    return None


def _released(before: Job, done: Step) -> str | None:
    """S5: a boundary of `all` is released after each member was routed at the new version, or left."""
    stood, boundary = before.meta.boundary, done.job.meta.boundary
    if boundary is None or boundary.release != "routed":
        return None
    here = (boundary.run, boundary.boundary)
    if stood is not None and stood.released and (stood.run, stood.boundary) == here:
        return None  # said again
    released = [each for each in done.decisions if isinstance(each, BoundaryReleased)]
    if any((each.run, each.boundary) == here and each.outcome == "done" for each in released):
        return _left_behind(done.job, boundary.awaiting)
    return None


def _left_behind(job: Job, members: tuple[EngineName, ...]) -> str | None:
    for name in members:
        engine = job.engines[name]
        routed = engine.route is not None and engine.route.version == job.meta.version
        if engine.phase in (Phase.SYNCING, Phase.VERIFYING) or (engine.phase is Phase.SERVING and not routed):
            return f"S5: its boundary is released while {name} is {engine.phase}"
    return None


def of_job(job: Job) -> str | None:
    """What a committed job may not be."""
    meta, settings = job.meta, job.settings
    if meta.trainer_silent and (meta.boundary is not None or meta.sync is not None):
        return f"S4: run {meta.run} is silent, and its boundary or sync stands"
    if meta.sync is not None and meta.boundary is None:
        published, order = meta.published, meta.sync.order
        if published is None or published.version != order.version:
            return f"S4: sync {order.sync} is open, its boundary is not, and its weights do not stand"
    starting = [name for name, engine in job.engines.items() if engine.phase is Phase.STARTING]
    if len(starting) > settings.starts_per_job:
        return f"budget: {', '.join(starting)} start at once, and {settings.starts_per_job} may"
    for name, engine in job.engines.items():
        if engine.phase is Phase.VERIFYING and engine.version != meta.version:
            return f"S1: {name} is to be proven at {engine.version}, and the job is at {meta.version}"
        if len(engine.restarts) > settings.restarts:
            spent = f"{len(engine.restarts)} times within {settings.restart_window_s:.0f} s"
            return f"budget: {name} is started again {spent}, and {settings.restarts} are allowed"
    return None


def of_waits(before: Job, job: Job, now: int) -> str | None:
    """L3: no wait outlives its deadline (`now`: bus time in ms) but by a moment, while one epoch decides."""
    if before.epoch != job.epoch:
        return None
    for what, due in _waits(job):
        if due + LATE_MS < now:
            return f"L3: {what} is waited for {now - due} ms after its deadline"
    return None


def _waits(job: Job) -> Iterator[tuple[str, int]]:
    silent = {node for node, record in job.meta.nodes.items() if record.silent}
    unheard = {node for node, record in job.meta.nodes.items() if record.reported != job.epoch}
    if job.meta.sync is not None:
        yield f"sync {job.meta.sync.order.sync}", job.meta.sync.order.deadline
    for name, engine in job.engines.items():
        intent = engine.intent
        if intent is not None and not intent.dry_run and engine.node not in silent | unheard:
            yield f"{type(intent).__name__} of {name}.{engine.incarnation}", intent.deadline
    for node, record in job.meta.nodes.items():
        if record.asked is not None and node not in silent:
            yield f"the report of node {node}", record.asked.deadline
