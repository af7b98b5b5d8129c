"""Restarting every engine of a job, one after the other: the next one goes when all the others serve."""

from collections.abc import Iterable

from relight.events.ids import EngineName
from relight.events.values import Loaded, Phase
from relight.orchestrator.core import recovery
from relight.orchestrator.core.enter import enter
from relight.orchestrator.core.job import ENDED_FOR_GOOD, Work

UP = (Phase.SERVING, Phase.STALE, Phase.SYNCING, Phase.VERIFYING, Phase.SILENT)


def begin(work: Work) -> None:
    """Take note of every engine that is up. A wish that is told twice is one."""
    if work.meta.rolling and not work.meta.hold:
        work.count("late")
        return
    _note(work, (name for name, engine in work.engines.items() if engine.phase in UP))


def add(work: Work, name: EngineName) -> None:
    """Take note of one engine, which is to be restarted once the job is on hold no more."""
    _note(work, (name,))


def _note(work: Work, names: Iterable[EngineName]) -> None:
    noted = dict(work.meta.rolling) | {name: work.engines[name].incarnation for name in names}
    work.learn(rolling=tuple(Loaded(name, noted[name]) for name in sorted(noted)))


def go_on(work: Work) -> None:
    """Restart the next one that is still the incarnation that was meant, between two syncs."""
    meta = work.meta
    boundary = meta.boundary
    in_a_sync = boundary is not None and boundary.sync == "all" and not boundary.released
    if not meta.rolling or meta.hold or meta.finished or meta.sync is not None or in_a_sync:
        return
    if any(engine.phase not in (Phase.SERVING, *ENDED_FOR_GOOD) for engine in work.engines.values()):
        return
    (name, incarnation), *rest = meta.rolling
    work.learn(rolling=tuple(rest))
    engine = work.engines.get(name)
    if engine is None or engine.incarnation != incarnation or engine.phase is not Phase.SERVING:
        go_on(work)
        return
    why = "an operator asked for a restart of every engine"
    recovery.begin(work, name, why=why, by="operator")
    enter(work, name, Phase.STOPPING, reason=why)
