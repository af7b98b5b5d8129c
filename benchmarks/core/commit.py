"""A commit of a batch with one decision, against a plain XADD of the same decision on the same server."""

import statistics
import time
from pathlib import Path

from benchmarks.core.rig import Result, bus_in

from relight.events import codec
from relight.events.bus.job import Commit
from relight.events.decisions import RouteFenced
from relight.events.facts import EngineDead
from relight.events.ids import EngineName, EntryId, JobName, NodeName, Source
from relight.events.schema import EngineState, Meta, Route
from relight.events.values import Cause, Phase, Process
from relight.events.version import BASE
from relight.orchestrator.core.job import Job
from relight.orchestrator.core.step import step
from relight.orchestrator.settings import Settings

BAR = 2.0
WINDOWS, PAIRS = 40, 50
ME = Source("orchestrator/bench")
E0 = EngineName("e0")


def served() -> Job:
    engine = EngineState(
        phase=Phase.SERVING,
        node=NodeName("node-a"),
        incarnation=1,
        address="http://node-a:8000",
        route=Route(address="http://node-a:8000", version=BASE),
        version=BASE,
        processes=(Process(1000, 1),),
    )
    meta = Meta(birth="bench", version=BASE, settings=codec.builtins(Settings()))
    return Job(1, Settings(), meta, {E0: engine})


async def measure(directory: Path, *, windows: int = WINDOWS) -> Result:
    """Pairs, one after the other in alternating order; the median of the windows' ratios of medians."""
    death = EngineDead(engine=E0, incarnation=1, cause=Cause.SIGNAL, signal=9)
    decided = step(served(), death, now=1, cause=EntryId("1-1"))
    fence = next(decision for decision in decided.decisions if isinstance(decision, RouteFenced))
    state = dict([codec.encode_engine(E0, decided.job.engines[E0]), codec.encode_meta(decided.job.meta)])
    fields = codec.encode(fence, source=ME, time_ms=1_700_000_000_000) | {"after": "1700000000000-0"}
    ratios: list[float] = []
    commits: list[float] = []
    adds: list[float] = []
    async with bus_in(directory) as bus:
        job, raw = bus.job(JobName("bench")), bus.reader()
        lease = await job.take_lease("bench", ttl_ms=3_600_000)
        assert lease is not None
        number = 0

        async def commit() -> float:
            nonlocal number
            number += 1
            began_s = time.perf_counter()
            batch = Commit(number=number, cursor=EntryId(f"{number}-0"), state=state, decisions=(fence,))
            await job.commit(batch, lease=lease, source=ME)
            return time.perf_counter() - began_s

        async def add() -> float:
            began_s = time.perf_counter()
            await raw.xadd("plain", fields)  # type: ignore[arg-type]
            return time.perf_counter() - began_s

        for _ in range(50):
            await commit()
            await add()
        for window in range(windows):
            committed: list[float] = []
            added: list[float] = []
            for pair in range(PAIRS):
                if (window + pair) % 2:
                    committed.append(await commit())
                    added.append(await add())
                else:
                    added.append(await add())
                    committed.append(await commit())
            ratios.append(statistics.median(committed) / statistics.median(added))
            commits += committed
            adds += added
    ratio = statistics.median(ratios)
    return Result(
        {
            "plain XADD of a decision": f"{statistics.median(adds) * 1e6:.0f} µs",
            "commit of a batch with that decision": f"{statistics.median(commits) * 1e6:.0f} µs",
            "commit / XADD": f"{ratio:.2f} in the median of {windows} windows,"
            f" {min(ratios):.2f} to {max(ratios):.2f}; bar {BAR:g}",
        },
        f"commit {ratio:.2f} x XADD",
        ratio <= BAR,
    )
