"""What a case is judged by: the streams and the state, /proc, and what Ray lists."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import anyio

from relight.agents.adapters.ray import names
from relight.events.bus.client import open_bus
from relight.events.facts import EngineStarted, EngineStopped
from relight.events.schema import Snapshot
from relight.events.values import Phase, Process
from tests.ray_faults.world import Engine, Job
from tests.streams import Streams

WITHIN_S = 60.0
POLL_S = 0.1


class FellShort(Exception):
    """A case did not come out as it should. The message says in what."""


def until(holds: Callable[[], object], what: str, *, within_s: float = WITHIN_S) -> None:
    """Return when it holds; raises FellShort."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() >= deadline:
            raise FellShort(f"not within {within_s:g} s: {what}")
        time.sleep(POLL_S)


def snapshot(job: Job) -> Snapshot:
    """The state as the orchestrator has committed it."""

    async def read() -> Snapshot:
        async with open_bus(job.world.bus.url) as bus:
            return await bus.job(job.file.job).snapshot()

    return anyio.run(read)


def serving(job: Job, **incarnations: int) -> None:
    """Wait until the engines serve, each as the incarnation that is named."""

    def holds() -> bool:
        engines = snapshot(job).engines
        return all(
            name in engines
            and engines[name].phase is Phase.SERVING
            and engines[name].incarnation == incarnation
            for name, incarnation in incarnations.items()
        )

    try:
        until(holds, "")
    except FellShort:
        engines = snapshot(job).engines
        stand = {name: (state.phase.value, state.incarnation) for name, state in engines.items()}
        raise FellShort(f"wanted serving {incarnations}, and there is {stand}") from None


def lives(job: Job) -> Iterator[str]:
    """Each incarnation was started once, on one node, and no engine lives twice."""

    started: defaultdict[tuple[str, int], set[tuple[Process, ...]]] = defaultdict(set)
    for fact in _told(job).facts:
        if isinstance(fact, EngineStarted):
            started[fact.engine, fact.incarnation].add(tuple(sorted(fact.processes))[:1])
    for (name, incarnation), firsts in started.items():
        if len(firsts) > 1:
            yield f"{name}.{incarnation} was started {len(firsts)} times"
    counts = Counter(engine.name for engine in job.engines())
    yield from (f"{name} lives {count} times" for name, count in counts.items() if count > 1)


def one_after_another(job: Job, name: str, incarnation: int, stopped: set[str]) -> Iterator[str]:
    """This incarnation of an engine over several nodes is the only one behind the last, and it began on none
    before these had proven their parts of the last one gone."""
    facts = [each for each in _told(job).facts if isinstance(each, EngineStarted | EngineStopped)]
    mine = [each for each in facts if each.engine == name]
    begun = [each for each in mine if isinstance(each, EngineStarted) and each.incarnation >= incarnation]
    if {each.incarnation for each in begun} != {incarnation}:
        yield f"{name} was started as {sorted({each.incarnation for each in begun})}, not {incarnation} alone"
        return
    before = mine[: mine.index(begun[0])]
    gone = {
        str(each.node)
        for each in before
        if isinstance(each, EngineStopped) and each.incarnation == incarnation - 1
    }
    if not stopped <= gone:
        yield f"{name}.{incarnation} began with {name}.{incarnation - 1} proven gone from {sorted(gone)} only"


def _told(job: Job) -> Streams:
    async def read() -> Streams:
        async with open_bus(job.world.bus.url) as bus:
            streams = Streams(bus.job(job.file.job))
            await streams.read()
            return streams

    return anyio.run(read)


def unchanged(before: dict[Engine, frozenset[Process]], job: Job, *names_: str) -> Iterator[str]:
    """These engines have the very processes that they had."""
    now = job.engines()
    for engine, processes in before.items():
        if engine.name in names_ and now.get(engine) != processes:
            yield f"{engine.name}.{engine.incarnation} has other processes than before"


def reservations() -> list[str]:
    """Of each placement group in the cluster that is not removed, its name."""
    import ray

    table = ray.util.placement_group_table().values()
    return sorted(str(group["name"]) for group in table if group["state"] != "REMOVED")


def left(job: Job) -> Iterator[str]:
    """What is there of a job that is down."""
    yield from (f"agent of {name} (pid {agent.pid})" for name, agent in job.agents().items())
    yield from (f"{engine.name}.{engine.incarnation} on {engine.node}" for engine in job.engines())
    yield from (f"actor {name}" for name in names.actors(job.file))
    if names.group_of(job.file) is not None:
        yield f"placement group {names.group(job.file)}"
