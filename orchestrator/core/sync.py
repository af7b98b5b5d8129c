"""The one open sync: who is in it, what each member does next, and how it ends or is voided.

Its members are named here and lie inside the open boundary that exports its version. What is cut off is
void, whatever is later said of it.
"""

from msgspec.structs import replace

from relight.events.decisions import LoadWeights, ProbeEngine, SyncWeights
from relight.events.facts import WeightsPublished, WeightsSynced
from relight.events.ids import EngineName, SyncId
from relight.events.schema import Boundary, EngineState, OpenSync
from relight.events.values import Failed, Member, Phase, Weights
from relight.events.version import Version
from relight.orchestrator.core import budget, recovery
from relight.orchestrator.core.enter import (
    enter,
    order_probe,
    order_route,
    snapshot_to_use,
    weights_to_start_on,
)
from relight.orchestrator.core.job import Work
from relight.orchestrator.core.restraint import observes


def order_sync(work: Work) -> None:
    """Ask for a sync where the open boundary exports the job's version and somebody needs it.

    A boundary of `all` is asked once even if nobody does, so that pulled weights stand for whoever
    comes later.
    """
    boundary = work.meta.boundary
    if boundary is None or boundary.exports is None or boundary.refused or boundary.released:
        return
    if work.meta.sync is not None or boundary.exports != work.meta.version:
        return
    if observes(work.settings) and boundary.ordered:
        return
    if any(record.reported != work.epoch and not record.silent for record in work.meta.nodes.values()):
        return
    names = [name for name in sorted(work.engines) if _needs_sync(work, name, boundary)]
    if names and not boundary.subset:
        names = [name for name in sorted(work.engines) if _can_sync(work, name)]
    if not names and (boundary.sync != "all" or boundary.ordered):
        return
    members = tuple(
        Member(name, work.engines[name].incarnation, work.engines[name].address or "") for name in names
    )
    order = work.decide(
        SyncWeights,
        reason=_why_sync(work, names, boundary),
        sync=SyncId(f"{boundary.run}.{boundary.boundary}-{work.next_id()}"),
        run=boundary.run,
        boundary=boundary.boundary,
        version=boundary.exports,
        members=members,
        deadline=work.after(work.settings.sync_s),
    )
    if observes(work.settings):  # nobody will do it, so nobody is waited for
        work.learn(boundary=replace(boundary, ordered=True))
        return
    awaiting = tuple(dict.fromkeys((*boundary.awaiting, *names)))
    work.learn(
        sync=OpenSync(order=order, pending=tuple(names)),
        boundary=replace(boundary, ordered=True, awaiting=awaiting),
    )
    for name in names:
        engine = work.engines[name]
        if engine.phase is Phase.STALE:
            enter(work, name, Phase.SYNCING, reason=order.reason)
        elif boundary.pushes and isinstance(engine.intent, ProbeEngine):
            work.put(name, intent=None)  # whoever is written into answers nobody; its next look is to come


def _can_sync(work: Work, name: EngineName) -> bool:
    engine = work.engines[name]
    if not work.told(engine) or engine.address is None:
        return False
    if engine.phase is Phase.STALE:
        return engine.not_before <= work.now and not work.meta.hold
    return engine.phase is Phase.SERVING


def _needs_sync(work: Work, name: EngineName, boundary: Boundary) -> bool:
    engine = work.engines[name]
    if not _can_sync(work, name):
        return False
    if engine.phase is Phase.SERVING:
        return boundary.sync == "all" and engine.version != boundary.exports
    asked = work.settings.recover_at != "snapshot" or not stands(work, boundary.exports)
    return boundary.sync == "all" or asked  # a snapshot that is lost is written again


def _why_sync(work: Work, names: list[EngineName], boundary: Boundary) -> str:
    stale = sum(work.engines[name].phase is Phase.STALE for name in names)
    serving = len(names) - stale
    return f"boundary {boundary.boundary} exports {boundary.exports}: {stale} stale, {serving} serving"


def load_snapshot(work: Work) -> None:
    """Engines get the published weights of the job's version: stale ones where recoveries may use them,
    and serving ones where the application has published them outside a sync."""
    weights, published = snapshot_to_use(work), work.meta.published
    if published is None or published.version != work.meta.version:
        return
    for name, engine in list(work.engines.items()):
        if not _can_sync(work, name):
            continue
        reason = f"{published.version} stands at {published.uri}"
        behind = engine.phase is Phase.SERVING and work.meta.sync is None and engine.intent is None
        if behind and engine.version != published.version:
            if engine.starts_only:
                _start_on(work, name, published)
            else:
                order_load(work, name, published, sync=None, reason=reason)
        elif engine.phase is Phase.STALE and engine.starts_only:
            if weights_to_start_on(work, engine) is not None:
                _start_on(work, name, published)
        elif engine.phase is Phase.STALE and weights is not None:
            order_load(work, name, weights, sync=None, reason=reason)
            enter(work, name, Phase.SYNCING, reason="it pulls published weights")


def _start_on(work: Work, name: EngineName, weights: Weights) -> None:
    """An engine that must not be reloaded is stopped, and started on the weights, outside its budget."""
    reason = f"it is only started on weights, and {weights.version} stands at {weights.uri}"
    under_way = work.engines[name].recovery
    if under_way is None:
        recovery.begin(work, name, why=reason, by="sync")
    else:
        work.put(name, recovery=replace(under_way, budgeted=False))
    enter(work, name, Phase.STOPPING, reason=reason)


def weights_published(work: Work, fact: WeightsPublished) -> None:
    """Weights stand: each waiting member of the sync that asked for them loads them."""
    weights = Weights(version=fact.version, uri=fact.uri, digest=fact.digest)
    if fact.sync is None:
        known = work.meta.published
        older = known is not None and fact.version < known.version
        if work.meta.finished or older or fact.version.run < work.meta.run:
            work.count("late")
            return
        work.learn(published=weights)
        version_moved(work, fact.version)
        return
    sync, boundary = work.meta.sync, work.meta.boundary
    if sync is None or sync.order.sync != fact.sync or sync.order.version != fact.version:
        work.count("late")
        if boundary is not None and boundary.exports == fact.version:
            work.learn(published=weights)
        return
    work.learn(published=weights)
    for name in sync.pending:
        engine = work.engines[name]
        if engine.starts_only:
            _start_on(work, name, weights)
        elif not isinstance(engine.intent, LoadWeights) or engine.intent.sync != fact.sync:
            order_load(work, name, weights, sync=sync.order, reason=f"{fact.version} stands at {fact.uri}")


def order_load(
    work: Work, name: EngineName, weights: Weights, *, sync: SyncWeights | None, reason: str
) -> None:
    """Ask the engine to pull `weights`, inside `sync` or by themselves."""
    deadline = work.after(work.settings.load_s)
    if sync is not None:
        deadline = min(deadline, sync.deadline)
    work.order(
        LoadWeights,
        name,
        reason=reason,
        sync=sync.sync if sync else None,
        version=weights.version,
        uri=weights.uri,
        digest=weights.digest,
        deadline=deadline,
    )


def weights_synced(work: Work, fact: WeightsSynced) -> None:
    """A push ended, or the trainer refused."""
    sync = work.meta.sync
    if sync is None or sync.order.sync != fact.sync:
        work.count("late")
        return
    members = {(member.engine, member.incarnation) for member in sync.order.members}
    for loaded in fact.loaded:
        if (loaded.engine, loaded.incarnation) in members:
            _pushed(work, loaded.engine, loaded.incarnation, fact)
    for failed in fact.failed:
        if (failed.engine, failed.incarnation) in members:
            _push_failed(work, failed)
    work.learn(sync=None)
    for name in sync.pending:
        if work.engines[name].phase is Phase.SYNCING:
            enter(work, name, Phase.STALE, reason=f"sync {fact.sync} ended without it")
    if sync.order.members and not fact.loaded and not any(failed.touched for failed in fact.failed):
        why = fact.failed[0].error if fact.failed else "it names no member"
        _refused(work, sync.order, why=why)


def _pushed(work: Work, name: EngineName, incarnation: int, fact: WeightsSynced) -> None:
    engine = _member(work, name, incarnation)
    if engine is None:
        return
    recovery.mark(work, name, "sync")
    work.put(name, version=fact.version, digest=fact.digest, intent=None)
    if engine.phase is Phase.SERVING:
        confirm_route(work, name)
        if fact.digest is None:
            order_probe(work, name, reason=f"what it computes at {fact.version} is looked at, aside")
    elif fact.version == work.meta.version:
        enter(work, name, Phase.VERIFYING, reason=f"sync {fact.sync} handed over {fact.version}")
    else:
        enter(work, name, Phase.STALE, reason=f"the job moved on from {fact.version}")


def _member(work: Work, name: EngineName, incarnation: int) -> EngineState | None:
    """The engine, where what was named in an order is there still."""
    engine = work.engines.get(name)
    if engine is None or engine.incarnation != incarnation:
        return None
    return engine if engine.phase in (Phase.SYNCING, Phase.SERVING) else None


def _push_failed(work: Work, failed: Failed) -> None:
    name = failed.engine
    engine = _member(work, name, failed.incarnation)
    if engine is None:
        return
    if failed.touched:
        recovery.begin(work, name, why=f"its weights were touched: {failed.error}", by="sync")
        enter(work, name, Phase.STOPPING, reason=f"the sync touched it and failed: {failed.error}")
    elif engine.phase is Phase.SYNCING:
        enter(work, name, Phase.STALE, reason=f"the sync did not touch it: {failed.error}")
    elif engine.route is not None:
        order_route(work, name, reason=f"the sync did not touch it: {failed.error}")


def confirm_route(work: Work, name: EngineName) -> None:
    """An open step of a serving engine was answered: a version that moved, or a suspicion that was
    wrong, is said with the route that stands."""
    engine = work.engines[name]
    if engine.route is None or engine.version is None:
        return
    if engine.route.version != engine.version:
        work.put(name, route=replace(engine.route, version=engine.version))
        order_route(work, name, reason=f"it holds {engine.version} now")
    elif engine.suspected:
        order_route(work, name, reason="it was suspected and is well")


def settle_sync(work: Work) -> None:
    """Members that loaded or left are no longer waited for; with the last one the sync ends."""
    sync = work.meta.sync
    if sync is None:
        return
    incarnations = {member.engine: member.incarnation for member in sync.order.members}
    pending = tuple(name for name in sync.pending if _is_pending(work, name, incarnations[name], sync.order))
    if pending != sync.pending:
        work.learn(sync=OpenSync(order=sync.order, pending=pending))
    if not pending and (sync.order.members or stands(work, sync.order.version)):
        work.learn(sync=None)


def _is_pending(work: Work, name: EngineName, incarnation: int, order: SyncWeights) -> bool:
    """A push writes into each member until its trainer says that it has ended, also into one that holds the
    version already."""
    engine = work.engines[name]
    if engine.incarnation != incarnation:
        return False
    if engine.phase is not Phase.SERVING:
        return engine.phase is Phase.SYNCING
    return engine.version != order.version or _pushes(work, order)


def stands(work: Work, version: Version | None) -> bool:
    published = work.meta.published
    return version is not None and published is not None and published.version == version


def void(work: Work, *, cut_off: bool, reason: str) -> None:
    """The open sync is void. A load of immutable weights goes on; a push may have touched any member."""
    sync = work.meta.sync
    if sync is None:
        return
    work.learn(sync=None)
    touched = cut_off and _pushes(work, sync.order)
    for name in sync.pending:
        engine = work.engines[name]
        if isinstance(engine.intent, LoadWeights):
            continue
        if touched and engine.phase in (Phase.SYNCING, Phase.SERVING):
            recovery.begin(work, name, why=reason, by="sync")
            enter(work, name, Phase.STOPPING, reason=reason)
        elif engine.phase is Phase.SYNCING:
            enter(work, name, Phase.STALE, reason=reason)


def _pushes(work: Work, order: SyncWeights) -> bool:
    """Whether the trainer writes into members itself; one that does not say so has published, or may."""
    boundary, published = work.meta.boundary, work.meta.published
    if boundary is not None and boundary.pushes is not None:
        return boundary.pushes
    return published is None or published.version.run != order.run


def expire_sync(work: Work) -> None:
    """The open sync's deadline has passed before its members loaded."""
    sync = work.meta.sync
    if sync is None or work.now < sync.order.deadline:
        return
    reason = f"sync {sync.order.sync} was not done by its deadline"
    work.alarm("sync", f"{reason}; waiting for {', '.join(sync.pending) or 'the trainer'}", reason=reason)
    void(work, cut_off=True, reason=reason)
    _refused(work, sync.order)


def _refused(work: Work, order: SyncWeights, *, why: str | None = None) -> None:
    """Nothing came of the sync. A boundary of `all` is given up, and another one will come; the rollouts that
    one of `stale` waits for may need these very members, so after a rest they are named again."""
    boundary = work.meta.boundary
    if boundary is None or boundary.boundary != order.boundary:
        return
    if boundary.sync == "all":
        work.learn(boundary=replace(boundary, refused=True, awaiting=()))
        return
    if why is not None:
        work.alarm(
            "sync", f"sync {order.sync} was refused: {why}", reason="it is asked for again after a rest"
        )
    for member in order.members:
        engine = work.engines.get(member.engine)
        if engine is not None and engine.phase is Phase.STALE:
            work.put(member.engine, not_before=budget.retry_at(work))


def version_moved(work: Work, version: Version) -> None:
    """The job is at `version` now. Routes that stand are proven at what they name until a sync moves them."""
    if work.meta.version is not None and version <= work.meta.version:
        return
    work.learn(version=version)
    for name, engine in list(work.engines.items()):
        if engine.phase is Phase.VERIFYING:
            enter(work, name, Phase.STALE, reason=f"the job moved on to {version}")
