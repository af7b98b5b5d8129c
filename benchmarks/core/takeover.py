"""How long a job has no orchestrator after its own is killed or frozen, with the default lease."""

import random
import signal
from contextlib import ExitStack
from pathlib import Path

import anyio
from benchmarks.core.rig import (
    Orchestrator,
    Result,
    bus_in,
    epochs,
    names,
    percentile,
    seed,
    spread,
    taken_over,
)

from relight.events.bus.client import Bus
from relight.events.ids import JobName

BAR_S = 3.5
JOBS = 12
ROUNDS = 4
"""Of one kill and one freeze each; every one of them is a take-over of each job that was held."""


async def measure(directory: Path, *, rounds: int = ROUNDS) -> Result:
    chance = random.Random(3)
    took: dict[signal.Signals, list[float]] = {signal.SIGKILL: [], signal.SIGSTOP: []}
    jobs = names("job", JOBS)
    async with bus_in(directory) as bus:
        seeded = await seed(bus, jobs, engines=4)
        with ExitStack() as stack:
            running = [_start(bus, directory, stack) for _ in range(2)]
            await taken_over(bus, jobs, above=seeded)
            for _ in range(rounds):
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    await anyio.sleep(2.5 + chance.random())  # renewals are at no fixed moment of a round
                    lost, its = await _most_loaded(bus, running, jobs)
                    before = await epochs(bus, its)
                    lost.send(number)
                    took[number] += await taken_over(bus, its, above=before)
                    if number is signal.SIGSTOP:
                        lost.send(signal.SIGCONT)
                    else:
                        running.remove(lost)
                        running.append(_start(bus, directory, stack))
    every = [seconds for each in took.values() for seconds in each]
    p50, p99 = percentile(every, 50), percentile(every, 99)
    return Result(
        {
            "killed (SIGKILL) → taken over": spread(took[signal.SIGKILL], "s"),
            "frozen (SIGSTOP) → taken over": spread(took[signal.SIGSTOP], "s"),
            "take-over": f"{spread(every, 's')}; bar p99 {BAR_S:g} s",
        },
        f"take-over p50 {p50:.2f} s, p99 {p99:.2f} s",
        p99 <= BAR_S,
    )


def _start(bus: Bus, directory: Path, stack: ExitStack) -> Orchestrator:
    process = Orchestrator(bus.url, directory)
    stack.callback(process.end)
    return process


async def _most_loaded(
    bus: Bus, running: list[Orchestrator], jobs: list[JobName]
) -> tuple[Orchestrator, list[JobName]]:
    """The process that holds most jobs, and which."""
    holders = await bus.roll().holders(jobs)
    held = {
        process: [job for job, holder in zip(jobs, holders, strict=True) if f"-{process.pid}-" in str(holder)]
        for process in running
    }
    most = max(running, key=lambda process: len(held[process]))
    return most, held[most]
