"""A thousand jobs on one orchestrator: how fast a fact wakes its job, what idling costs, and how long it is
until all are taken."""

import random
import signal
import statistics
from pathlib import Path

import anyio
import psutil
from benchmarks.core.rig import (
    Orchestrator,
    Result,
    Victims,
    bus_in,
    epochs,
    listening,
    names,
    orchestrator,
    percentile,
    seed,
    spread,
    taken_over,
)

BAR_MS = 20.0
JOBS = 1000
ENGINES = 4
SAMPLES = 1000
PER_S = 50.0
IDLE_S = 8.0


async def measure(directory: Path, *, samples: int = SAMPLES) -> Result:
    jobs = names("job", JOBS)
    async with bus_in(directory) as bus:
        seeded = await seed(bus, jobs, engines=ENGINES)
        async with orchestrator(bus, directory) as first:
            started = await taken_over(bus, jobs, above=seeded)
            await listening(bus, JOBS)
            await anyio.sleep(2.0)
            idle, memory = await _idle(first)
            victims = Victims(bus, jobs, engines=ENGINES)
            pace = random.Random(2)
            woken: list[float] = []
            for _ in range(samples):
                await anyio.sleep(pace.expovariate(PER_S))
                woken.append(await victims.fence_ms())
            async with orchestrator(bus, directory) as second:
                await anyio.sleep(2.5)  # it is up, and has been handed nothing yet
                standing_by, _ = await _idle(second, for_s=0.5)
                before = await epochs(bus, jobs)
                first.send(signal.SIGKILL)
                taken = await taken_over(bus, jobs, above=before)
    p99 = percentile(woken, 99)
    return Result(
        {
            f"fact appended → its commit readable, {JOBS} jobs": f"{spread(woken)}; bar p99 {BAR_MS:g} ms",
            f"one orchestrator with {JOBS} idle jobs": f"{idle:.0%} of one core, {memory:.0f} MiB",
            f"a standby that looks at {JOBS} jobs": f"{standing_by:.0%} of one core",
            f"an orchestrator starts and takes {JOBS} free jobs": f"the last after {max(started):.1f} s",
            f"it is killed: another one takes all {JOBS}": f"{spread(taken, 's')}",
        },
        f"wake-up p99 {p99:.1f} ms of {JOBS} jobs, idle {idle:.0%} of a core",
        p99 <= BAR_MS,
    )


async def _idle(process: Orchestrator, *, for_s: float = IDLE_S) -> tuple[float, float]:
    """The share of a core that it uses, in the median of windows, and its memory in MiB."""
    watched = psutil.Process(process.pid)
    shares: list[float] = []
    for _ in range(4):
        before = watched.cpu_times()
        await anyio.sleep(for_s / 4)
        after = watched.cpu_times()
        shares.append((after.user + after.system - before.user - before.system) / (for_s / 4))
    return statistics.median(shares), watched.memory_info().rss / 2**20
