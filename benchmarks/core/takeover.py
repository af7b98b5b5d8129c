"""How long a job has no orchestrator after its own is killed, frozen or cut off, with the default lease."""

import random
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

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
from tests.slow_link import Link, link_to

from relight.events.bus.client import Bus
from relight.events.ids import JobName

BAR_S = 3.5
JOBS = 12
ROUNDS = 4
"""Of each loss once; every one of them is a take-over of each job that was held."""
LOSSES = ("killed", "frozen", "cut off")


class Standby(NamedTuple):
    """One of the two processes, and its way to the bus."""

    process: Orchestrator
    link: Link


async def measure(directory: Path, *, rounds: int = ROUNDS) -> Result:
    chance = random.Random(3)
    took: dict[str, list[float]] = {loss: [] for loss in LOSSES}
    jobs = names("job", JOBS)
    async with bus_in(directory) as bus, AsyncExitStack() as stack:
        seeded = await seed(bus, jobs, engines=4)
        running = [await _start(bus, directory, stack) for _ in range(2)]
        await taken_over(bus, jobs, above=seeded)
        for _ in range(rounds):
            for loss in LOSSES:
                await anyio.sleep(2.5 + chance.random())  # renewals are at no fixed moment of a round
                lost, its = await _most_loaded(bus, running, jobs)
                before = await epochs(bus, its)
                _lose(lost, loss)
                took[loss] += await taken_over(bus, its, above=before)
                if loss == "killed":
                    running.remove(lost)
                    running.append(await _start(bus, directory, stack))
                else:
                    _find(lost, loss)
    every = [seconds for each in took.values() for seconds in each]
    p50, p99 = percentile(every, 50), percentile(every, 99)
    return Result(
        {
            **{f"{loss} → taken over": spread(seconds, "s") for loss, seconds in took.items()},
            "take-over": f"{spread(every, 's')}; bar p99 {BAR_S:g} s",
        },
        f"take-over p50 {p50:.2f} s, p99 {p99:.2f} s",
        p99 <= BAR_S,
    )


async def _start(bus: Bus, directory: Path, stack: AsyncExitStack) -> Standby:
    link = await stack.enter_async_context(link_to(urlsplit(bus.url).port or 0))
    process = Orchestrator(f"redis://127.0.0.1:{link.port}", directory)
    stack.callback(process.end)
    return Standby(process, link)


def _lose(lost: Standby, loss: str) -> None:
    match loss:
        case "killed":
            lost.process.send(signal.SIGKILL)
        case "frozen":
            lost.process.send(signal.SIGSTOP)
        case _:
            lost.link.cut_to_server()
            lost.link.cut_to_client()


def _find(lost: Standby, loss: str) -> None:
    """It goes on."""
    if loss == "frozen":
        lost.process.send(signal.SIGCONT)
    else:
        lost.link.join()


async def _most_loaded(
    bus: Bus, running: list[Standby], jobs: list[JobName]
) -> tuple[Standby, list[JobName]]:
    """The process that holds most jobs, and which."""
    holders = await bus.roll().holders(jobs)
    held = {
        one: [job for job, holder in zip(jobs, holders, strict=True) if f"-{one.process.pid}-" in str(holder)]
        for one in running
    }
    most = max(running, key=lambda one: len(held[one]))
    return most, held[most]
