"""From a death that is told to the fence that everybody can read, in a quiet job and beside a storm."""

import statistics
import time
from pathlib import Path

import anyio
from benchmarks.core.rig import (
    WITHIN_S,
    Result,
    Victims,
    bus_in,
    listening,
    names,
    orchestrator,
    percentile,
    seed,
    spread,
    taken_over,
)

from relight.events.bus.job import JobBus
from relight.events.ids import BEGINNING

BAR_MS = 50.0
STORM_BAR = 1.20
ENGINES = 100
"""Of each job; a storm is the death of all of them."""
EVERY_S = 0.015
SAMPLES = 4
"""Of one window: what a storm lasts, about."""
BLOCKS = 5
WINDOWS = 40
"""Pairs of windows in a block, with and without a storm in turn."""


async def measure(directory: Path, *, blocks: int = BLOCKS) -> Result:
    quiet, stormy, lasted = [], [], []
    async with bus_in(directory) as bus:
        victims = names("victim", (blocks * WINDOWS * SAMPLES * 2) // ENGINES + 2)
        storms = names("storm", blocks * WINDOWS)
        every = [*victims, *storms]
        before = await seed(bus, every, engines=ENGINES)
        async with orchestrator(bus, directory):
            await taken_over(bus, every, above=before)
            await listening(bus, len(every))
            here, there = (Victims(bus, group, engines=ENGINES) for group in (victims, storms))
            for _ in range(10):  # warm
                await here.fence_ms()
            ratios: list[float] = []
            for _ in range(blocks):
                without: list[float] = []
                beside: list[float] = []
                for window in range(WINDOWS):
                    for storm in (True, False) if window % 2 else (False, True):
                        if storm:
                            job, began_ms = await there.storm(ENGINES)
                            beside += await _window(here)
                            lasted.append(await _last_fence_ms(job, began_ms))
                        else:
                            without += await _window(here)
                        await anyio.sleep(0.1)
                ratios.append(percentile(beside, 99) / percentile(without, 99))
                quiet += without
                stormy += beside
    p99 = percentile(quiet, 99)
    ratio = percentile(stormy, 99) / p99
    return Result(
        {
            "death told → fence readable": f"{spread(quiet)}; bar p99 {BAR_MS:g} ms",
            f"the same while {ENGINES} engines of another job die": spread(stormy),
            "change of the p99": f"{ratio - 1:+.0%} of all samples; blocks of {WINDOWS * SAMPLES}:"
            f" {', '.join(f'{one - 1:+.0%}' for one in ratios)}; bar {STORM_BAR - 1:+.0%}",
            f"a storm of {ENGINES} deaths, to its last fence": f"{statistics.median(lasted):.0f} ms"
            f" in the median of {len(lasted)}",
        },
        f"fence p99 {p99:.1f} ms, beside a storm {ratio - 1:+.0%}",
        p99 <= BAR_MS and ratio <= STORM_BAR,
    )


async def _window(victims: Victims) -> list[float]:
    """Samples at a steady pace from now on."""
    took: list[float] = []
    began_s = time.perf_counter()
    for sample in range(SAMPLES):
        await anyio.sleep(max(0.0, began_s + sample * EVERY_S - time.perf_counter()))
        took.append(await victims.fence_ms())
    return took


async def _last_fence_ms(job: JobBus, began_ms: float) -> float:
    """How long after `began_ms` the last engine of the job was fenced, by this machine's clock as the
    decision bears it: whoever read along would take part in what is measured."""
    fenced: list[int] = []
    with anyio.fail_after(WITHIN_S):
        while len(fenced) < ENGINES:
            entries = await job.read_decisions(BEGINNING, count=10 * ENGINES)
            fenced = [entry.time for entry in entries if entry.type == "RouteFenced"]
            await anyio.sleep(0.02)
    return max(fenced) - began_ms
