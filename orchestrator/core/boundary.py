"""The trainer's words: its boundaries, its runs, its silence and its end.

Words of an older run have no effect; a newer run's first word takes every route away.
"""

from msgspec.structs import replace

from relight.events.decisions import BoundaryReleased, SyncWeights
from relight.events.facts import JobFinished, SafeBoundary, TrainerSilent
from relight.events.ids import EngineName
from relight.events.schema import Boundary, OpenSync
from relight.events.values import Phase
from relight.orchestrator.core import proof, recovery
from relight.orchestrator.core.enter import enter, order_probe
from relight.orchestrator.core.job import Work
from relight.orchestrator.core.sync import stands, version_moved, void


def boundary_told(work: Work, fact: SafeBoundary) -> None:
    """A boundary opened, closed, or is told again as it stands."""
    meta = work.meta
    if fact.run < meta.run:
        work.count("late")
        return
    if fact.run > meta.run:
        _new_run(work, fact)
    open_now = work.meta.boundary
    if open_now is not None and fact.boundary < open_now.boundary:
        work.count("late")
        return
    if fact.state == "closed":
        _closed(work, fact)
    elif open_now is not None and open_now.boundary == fact.boundary:
        _told_again(work, open_now, fact)
    else:
        if open_now is not None:
            void(work, cut_off=False, reason=f"boundary {open_now.boundary} was left for another one")
        _opened(work, fact)


def _opened(work: Work, fact: SafeBoundary) -> None:
    boundary = Boundary(
        run=fact.run,
        boundary=fact.boundary,
        step=fact.step,
        exports=fact.exports,
        phase=fact.phase,
        sync=fact.sync,
        release=fact.release,
        subset=fact.subset,
        pushes=fact.pushes,
    )
    at = work.meta.version
    if fact.exports is not None and at is not None and fact.exports < at:
        boundary = replace(boundary, refused=True)
        work.alarm(
            "version",
            f"boundary {fact.boundary} of run {fact.run} exports {fact.exports}, but the job is at {at}",
            reason="versions never go backwards within a run",
        )
    work.learn(boundary=boundary, trainer_silent=False)
    if fact.exports is not None:  # of `stale` too: syncs may have been left out, or their words been lost
        version_moved(work, fact.exports)


def _new_run(work: Work, fact: SafeBoundary) -> None:
    """Words of older runs are void, and no engine holds this run's weights."""
    void(work, cut_off=True, reason=f"run {fact.run} took over from run {work.meta.run}")
    work.learn(run=fact.run, version=fact.version, finished=False, boundary=None, trainer_silent=False)
    for name, engine in list(work.engines.items()):
        if engine.phase in (Phase.SERVING, Phase.VERIFYING):
            enter(work, name, Phase.STALE, reason=f"run {fact.run} began at {fact.version}")


def _told_again(work: Work, boundary: Boundary, fact: SafeBoundary) -> None:
    """The trainer was asked, or came back: what it may have missed is said again."""
    boundary = replace(boundary, exports=fact.exports, phase=fact.phase)
    work.learn(boundary=boundary, trainer_silent=False)
    if fact.exports is not None:
        version_moved(work, fact.exports)
    if boundary.released:
        _release(work, "done", reason="said again on the trainer's report")
    sync = work.meta.sync
    if sync is not None and sync.order.epoch != work.epoch:
        order = work.decide(
            SyncWeights,
            reason="said again under this epoch",
            sync=sync.order.sync,
            run=sync.order.run,
            boundary=sync.order.boundary,
            version=sync.order.version,
            members=sync.order.members,
            deadline=work.after(work.settings.sync_s),
        )
        work.learn(sync=OpenSync(order=order, pending=sync.pending))


def _closed(work: Work, fact: SafeBoundary) -> None:
    sync, boundary = work.meta.sync, work.meta.boundary
    written = boundary is not None and boundary.release == "written" and stands(work, fact.version)
    if sync is not None and sync.order.boundary == fact.boundary and not written:
        cut = fact.cut_off == sync.order.sync
        how = "cut off by the close of" if cut else "not done by the close of"
        void(work, cut_off=cut, reason=f"sync {sync.order.sync} was {how} boundary {fact.boundary}")
    work.learn(boundary=None, trainer_silent=False)


def trainer_silent(work: Work, fact: TrainerSilent) -> None:
    """Its boundary and the open sync are void; it may come back and say that it is open still."""
    if fact.run != work.meta.run or work.meta.trainer_silent:
        return
    work.decisions.append(fact)
    void(work, cut_off=True, reason=f"trainer run {fact.run} fell silent")
    work.learn(boundary=None, trainer_silent=True)
    work.alarm("trainer", f"run {fact.run} has not pulsed", reason="its boundary and open sync are void")


def job_finished(work: Work, fact: JobFinished) -> None:
    """A clean end: nothing is routed and nothing is recovered before another run begins."""
    if fact.run != work.meta.run or work.meta.finished:
        return
    void(work, cut_off=False, reason=f"run {fact.run} finished")
    work.learn(finished=True, version=None, boundary=None, published=None)
    for name, engine in list(work.engines.items()):
        recovery.finish(work, name, "cancelled")
        if engine.phase in (Phase.SERVING, Phase.VERIFYING):
            enter(work, name, Phase.STALE, reason=f"run {fact.run} finished")


def release_if_done(work: Work) -> None:
    """A boundary of `all` is released once its sync ended and each member was routed or left; one that
    asks for no more than the export, once that stands."""
    boundary = work.meta.boundary
    if boundary is None or boundary.sync != "all" or boundary.released:
        return
    if boundary.refused or boundary.exports is None:
        _release(
            work,
            "refused" if boundary.refused else "nothing to export",
            reason="there is nothing to wait for",
        )
    elif boundary.release == "written" and stands(work, boundary.exports):
        _release(work, "done", reason="the export stands")
    elif boundary.ordered and work.meta.sync is None and not _awaits_anyone(work, boundary):
        _release(work, "done", reason="each member was routed or left")


def _awaits_anyone(work: Work, boundary: Boundary) -> bool:
    return any(_is_waited_for(work, name) for name in boundary.awaiting)


def _is_waited_for(work: Work, name: EngineName) -> bool:
    engine = work.engines[name]
    if engine.phase is Phase.SERVING:
        return engine.route is None or engine.route.version != work.meta.version
    if engine.phase is Phase.STALE:
        return engine.not_before <= work.now
    return engine.phase in (Phase.SYNCING, Phase.VERIFYING)


def _release(work: Work, outcome: str, *, reason: str) -> None:
    boundary = work.meta.boundary
    assert boundary is not None
    work.learn(boundary=replace(boundary, released=True))
    work.decide(
        BoundaryReleased, reason=reason, run=boundary.run, boundary=boundary.boundary, outcome=outcome
    )
    version = work.meta.version
    if outcome == "done" and all(known.version != version for known in work.meta.references):
        for name in work.serving():
            engine = work.engines[name]
            if engine.intent is None and engine.version == version and not proof.lacks(engine):
                order_probe(work, name, reason=f"its canary becomes the reference for {version}")
                break
