"""The rules S1 to S10 as questions that are asked of each step of the core and of each state of the world.

Each gives None, or what is broken in one line. What a step may do is judged by the job before and after it;
what a state may be, by what is committed and by what is really there.
"""

from typing import Any

from relight.events.decisions import (
    LoadWeights,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
    SyncWeights,
)
from relight.events.facts import EngineStopped, NodeSilent, NodeUp, OfEngine, RouteSuspected, SafeBoundary
from relight.events.ids import EngineName
from relight.events.schema import EngineState
from relight.events.values import Phase
from relight.orchestrator.core.job import Job, Step
from tests.search.agent import Agent, Process
from tests.search.pool import replace

UNROUTED = (Phase.SERVING, Phase.SYNCING)


def of_step(before: Job, heard: Any, done: Step) -> str | None:
    """What a step of the core breaks by itself."""
    after = done.job
    for broken in (
        _old_words(before, heard, done),
        _versions(before, heard, after),
        _members(before, done),
        _bystanders(before, heard, done),
        _openings(before, heard, done),
    ):
        if broken:
            return broken
    return None


def _old_words(before: Job, heard: Any, done: Step) -> str | None:
    """S3: nothing said by or for an older incarnation has an effect, but the proof that it is gone."""
    if not isinstance(heard, OfEngine):
        return None
    engine = before.engines.get(heard.engine)
    if engine is None or heard.incarnation >= engine.incarnation:
        return None
    if isinstance(heard, EngineStopped) and engine.left:
        return None
    same = done.job.engines == before.engines and _less_counters(done.job) == _less_counters(before)
    if same and not done.decisions:
        return None
    return f"S3: a word of {heard.engine}.{heard.incarnation} has an effect on .{engine.incarnation}"


def _less_counters(job: Job) -> Any:
    return replace(job.meta, counters={}, serial=0)


def _versions(before: Job, heard: Any, after: Job) -> str | None:
    """S9: versions never go backwards; a newer run's first word takes every route."""
    stood, stands = before.meta.published, after.meta.published
    if stood is not None and stands is not None and stands.version < stood.version:
        return f"S9: the published weights went from {stood.version} to {stands.version}"
    was, now = before.meta.version, after.meta.version
    if was is not None and now is not None and now < was and not isinstance(heard, SafeBoundary):
        return f"S9: the job's version went from {was} to {now}"
    if isinstance(heard, SafeBoundary) and heard.run == after.meta.run:
        if was is not None and now is not None and now < was and heard.run <= before.meta.run:
            return f"S9: the job's version went from {was} to {now} within run {heard.run}"
        for name, engine in after.engines.items():
            if engine.route is not None and engine.route.version.run < heard.run:
                return f"S9: {name} is routed at {engine.route.version} after run {heard.run} has spoken"
    return None


def _members(before: Job, done: Step) -> str | None:
    """S5: one sync at a time, of members that stand and of whose nodes the truth is known."""
    orders = [each for each in done.decisions if isinstance(each, SyncWeights)]
    if len(orders) > 1:
        return "S5: two syncs are ordered at once"
    for order in orders:
        if before.meta.sync is not None and before.meta.sync.order.sync == order.sync:
            continue  # said again: a boundary that asks for no more than the export may have closed since
        boundary = done.job.meta.boundary
        exports = boundary.exports if boundary else None
        if boundary is None or order.boundary != boundary.boundary or exports != order.version:
            return f"S4: a sync of {order.version} is ordered, but the boundary exports {exports}"
        for member in order.members:
            engine = done.job.engines[member.engine]
            if engine.phase not in UNROUTED or engine.incarnation != member.incarnation:
                return f"S5: {member.engine}.{member.incarnation} is a member in {engine.phase}"
            if any(done.job.meta.nodes[node].reported != done.job.epoch for node in engine.nodes):
                return f"S10: {member.engine} is a member before its node's report under this epoch"
            if boundary.sync == "stale" and boundary.subset and engine.phase is Phase.SERVING:
                return f"S7: {member.engine} serves and is a member of a sync of stale engines"
    return None


def _bystanders(before: Job, heard: Any, done: Step) -> str | None:
    """S7: what is said of one engine neither stops, fences nor syncs another."""
    if isinstance(heard, OfEngine) and not isinstance(heard, RouteSuspected):
        about: set[EngineName] = {heard.engine}
    elif isinstance(heard, tuple) and heard[0] in ("intent", "rest", "wait"):
        about = {EngineName(heard[1])}
    elif isinstance(heard, NodeSilent | NodeUp):
        moved = done.job.meta.version != before.meta.version
        about = (
            set(before.engines) if moved else {n for n, e in before.engines.items() if heard.node in e.nodes}
        )
    else:
        return None
    for each in done.decisions:
        if isinstance(each, RouteFenced | StopEngine) and each.engine not in about:
            engine = before.engines.get(each.engine)
            if engine is not None and engine.phase is Phase.SERVING and not _is_wanted(before, each.engine):
                return f"S7: {each.engine} serves and is fenced because of a word about another"
    return None


def _is_wanted(before: Job, name: EngineName) -> bool:
    """An operator asked for its end, and it waited for its turn."""
    rolling = {turn.engine for turn in before.meta.rolling}
    return name in rolling or before.engines[name].then != "restart"


def _openings(before: Job, heard: Any, done: Step) -> str | None:
    """S2: a slot is filled anew only on the proof that it is empty."""
    if isinstance(heard, NodeUp) or heard == "take over":
        return None
    for each in done.decisions:
        if not isinstance(each, StartEngine):
            continue
        engine = before.engines[each.engine]
        if engine.phase is Phase.STARTING and engine.incarnation == each.incarnation:
            continue  # said again: it was held back
        empty = engine.phase in (Phase.NEW, Phase.BACKOFF, Phase.STOPPED, Phase.RETIRED)
        proof = getattr(heard, "proof", None) is not None and heard.engine == each.engine
        if not empty and not proof:
            return f"S2: {each.engine}.{each.incarnation} is started from {engine.phase} without proof"
    return None


# --- the world -------------------------------------------------------------------------------------


def of_engine(job: Job, engine: EngineState, name: EngineName, agent: Agent) -> str | None:
    """What is committed of one engine against what is really there. Routes on another bus are void."""
    alive = [each.incarnation for each in agent.processes if each.alive]
    if len(alive) > 1:
        return f"S2: incarnations {alive} of {name} are alive at once"
    route = engine.route
    if route is None:
        return None
    here = next((each for each in agent.processes if each.incarnation == engine.incarnation), None)
    if here is None or not here.alive:
        return None
    if _is_named(job, engine, name):
        return None
    if here.cut_off:
        return f"S4: {name}.{here.incarnation} is routed after a push that was cut off wrote into it"
    if here.proven == route.version or here.failed:
        return None
    return f"S1: {name}.{here.incarnation} is routed at {route.version}, but {_holds(here)}"


def _is_named(job: Job, engine: EngineState, name: EngineName) -> bool:
    """An open sync names it, or a load that outlived one."""
    if isinstance(engine.intent, LoadWeights):
        return True
    sync = job.meta.sync
    return sync is not None and any(
        (member.engine, member.incarnation) == (name, engine.incarnation) for member in sync.order.members
    )


def _holds(here: Process) -> str:
    weights = "nobody knows what" if here.weights is None else str(here.weights)
    return f"it holds {weights} and is proven at {here.proven}"


def of_start(name: EngineName, incarnation: int, agent: Agent) -> str | None:
    """S2: nothing of an older incarnation is there when the next one is decided.

    One that was begun again after its proof is ended by the agent itself before it begins the next.
    """
    for each in agent.processes:
        if each.incarnation < incarnation and not each.again:
            left = "lives" if each.alive else "is not all gone"
            return f"S2: {name}.{incarnation} is started while {name}.{each.incarnation} {left}"
    return None


def of_parts(name: EngineName, head: Agent, further: Agent) -> str | None:
    """S2: parts of two incarnations are never there at once, but those that an agent began a second time."""
    for one in head.processes:
        for other in further.processes:
            if one.incarnation != other.incarnation and not (one.again or other.again):
                return f"S2: {name}.{one.incarnation} is at its head, {name}.{other.incarnation} at its part"
    return None


def of_route(route: RouteAdded, agent: Agent) -> str | None:
    """S1: a route is given to what is proven, or has died since."""
    for each in agent.processes:
        if each.alive and each.incarnation == route.incarnation and each.proven != route.version:
            name = f"{route.engine}.{route.incarnation}"
            return f"S1: {name} is given a route at {route.version}, but {_holds(each)}"
    return None


def of_report(what: str, name: str, epoch: int, agent: Agent) -> str | None:
    """S10: nothing is started or routed on a node before its report under this epoch; nothing older can reach
    one that has never obeyed anything."""
    if agent.obeyed >= epoch or not agent.obeyed:
        return None
    return f"S10: {name} is {what} under epoch {epoch}, which its agent has not heard of"
