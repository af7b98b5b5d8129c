"""What the parts of the core's benchmark share: jobs that stand on a bus, orchestrators in processes of their
own, and one fact's way to its decision, timed."""

import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio

from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.embedded import embedded
from relight.events.bus.job import Commit, JobBus, Numbered
from relight.events.facts import EngineDead
from relight.events.ids import BEGINNING, BootId, EngineName, EntryId, JobName, NodeName, Source
from relight.events.schema import EngineState, Meta, Route
from relight.events.values import Cause, Phase, Process
from relight.events.version import BASE

WITHIN_S = 60.0
"""Whatever is waited for has come by then."""
AGENT, BOOT = Source("agent/node-a"), BootId("bench")
SETTINGS = """
[defaults]
stop_s = 100000.0
keep_entries = 1000000
"""
"""Nobody answers here: stops do not run out, and nothing that is measured is trimmed."""


class Result(NamedTuple):
    """What one part found."""

    figures: dict[str, str]
    """Rows of the table."""
    line: str
    """The part's share of the last line."""
    met: bool


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100.0) - 1)]


def spread(values: Sequence[float], unit: str = "ms") -> str:
    """A distribution in a few words."""
    p50, p99 = percentile(values, 50), percentile(values, 99)
    return f"p50 {p50:.2f}, p99 {p99:.2f}, largest {max(values):.2f} {unit} of {len(values)}"


@asynccontextmanager
async def bus_in(directory: Path) -> AsyncGenerator[Bus]:
    """A server of its own, with an append-only file, and a connection to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    with embedded(directory / "bus") as server:
        async with open_bus(server.url) as bus:
            yield bus


async def seed(bus: Bus, names: Iterable[JobName], *, engines: int) -> list[int]:
    """Jobs in which so many engines serve, on the bus as an orchestrator of before left them; its epochs."""
    state = dict(
        codec.encode_engine(
            EngineName(f"e{n}"),
            EngineState(
                phase=Phase.SERVING,
                node=NodeName("node-a"),
                incarnation=1,
                address=f"http://node-a:{8000 + n}",
                route=Route(address=f"http://node-a:{8000 + n}", version=BASE),
                version=BASE,
                processes=(Process(1000 + n, 1),),
            ),
        )
        for n in range(engines)
    )
    stamp = await bus.stamp()
    epochs: list[int] = []
    for name in names:
        job = bus.job(name)
        lease = await job.take_lease("seed", ttl_ms=60_000)
        assert lease is not None
        meta = dict([codec.encode_meta(Meta(birth="seed", bus=stamp, version=BASE))])
        commit = Commit(number=1, cursor=BEGINNING, state={**state, **meta}, decisions=())
        await job.commit(commit, lease=lease, source=Source("orchestrator/seed"))
        await job.release_lease(lease)
        await bus.enrol(name)
        epochs.append(lease.epoch)
    return epochs


class Orchestrator:
    """An orchestrator in a process of its own."""

    def __init__(self, url: str, directory: Path) -> None:
        config = directory / "orchestrator.toml"
        config.write_text(SETTINGS)
        command = [sys.executable, "-m", "relight.orchestrator.cli", "orchestrate", "--bus", url]
        self.log = directory / f"orchestrator-{time.monotonic_ns()}.log"
        with self.log.open("wb") as out:
            self._process = subprocess.Popen([*command, "--config", str(config)], stderr=out)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """End it, as it stands."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(WITHIN_S)


@asynccontextmanager
async def orchestrator(bus: Bus, directory: Path) -> AsyncGenerator[Orchestrator]:
    process = Orchestrator(bus.url, directory)
    try:
        yield process
    finally:
        process.end()


async def epochs(bus: Bus, names: Sequence[JobName]) -> list[int]:
    """The epoch under which each job was last committed."""
    reader = bus.reader()
    try:
        async with reader.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hget(bus.job(name).keys.state, "epoch")
            return [int(epoch or 0) for epoch in await pipe.execute()]
    finally:
        await reader.aclose()


async def listening(bus: Bus, readers: int) -> None:
    """Return when so many readers are blocked: every job hears what is said."""
    clients = bus.reader()
    blocked = 0
    with anyio.fail_after(WITHIN_S):
        while blocked < readers * 0.98:  # some are between two reads
            await anyio.sleep(0.1)
            blocked = int((await clients.info("clients"))["blocked_clients"])


async def taken_over(bus: Bus, names: Sequence[JobName], *, above: Sequence[int]) -> list[float]:
    """Seconds from now until each job is committed under an epoch above that of `above`."""
    began_s = time.monotonic()
    taken: dict[JobName, float] = {}
    with anyio.fail_after(WITHIN_S):
        while len(taken) < len(names):
            for name, epoch, before in zip(names, await epochs(bus, names), above, strict=True):
                if epoch > before:
                    taken.setdefault(name, time.monotonic() - began_s)
            await anyio.sleep(0.01 + len(names) / 10_000)
    return [taken[name] for name in names]


class Victims:
    """Engines that serve, and die one after the other: each is one sample."""

    def __init__(self, bus: Bus, names: Iterable[JobName], *, engines: int, seed: int = 1) -> None:
        self._bus = bus
        self._reader = bus.reader()
        self._seqs: dict[JobName, int] = {}
        self._left = [(name, n) for n in range(engines) for name in names]
        random.Random(seed).shuffle(self._left)

    async def fence_ms(self) -> float:
        """From the append of one engine's EngineDead to its RouteFenced in the hands of a reader."""
        name, n = self._left.pop()
        job = self._bus.job(name)
        tail = EntryId(await self._reader.hget(job.keys.state, "tail") or BEGINNING)
        took: list[float] = []

        async def hear() -> None:
            with anyio.fail_after(WITHIN_S):
                entries = await job.read_decisions(tail, reader=self._reader, block_ms=1000)
                while not entries:
                    entries = await job.read_decisions(tail, reader=self._reader, block_ms=1000)
            took.append((time.perf_counter() - began_s) * 1000.0)
            assert entries[0].type == "RouteFenced" and f'"e{n}"' in entries[0].data, entries

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hear)
            await anyio.sleep(0.001)  # the reader is blocked by now
            began_s = time.perf_counter()
            await self._say(job, n)
        return took[0]

    async def storm(self, engines: int) -> "tuple[JobBus, float]":
        """All engines of one job die at once; the job, and when that was said (Unix ms)."""
        name = next(name for name, _ in self._left)
        self._left = [(other, n) for other, n in self._left if other != name]
        job = self._bus.job(name)
        deaths = [Numbered(n + 1, death(n), 0) for n in range(engines)]
        began_ms = time.time() * 1000.0
        await job.append(deaths, source=AGENT, boot=BOOT)
        return job, began_ms

    async def _say(self, job: JobBus, n: int) -> None:
        self._seqs[job.name] = self._seqs.get(job.name, 0) + 1
        await job.append([Numbered(self._seqs[job.name], death(n), 0)], source=AGENT, boot=BOOT)


def death(n: int) -> EngineDead:
    return EngineDead(engine=EngineName(f"e{n}"), incarnation=1, cause=Cause.SIGNAL, signal=9, detect_ms=2.0)


def names(prefix: str, count: int) -> list[JobName]:
    return [JobName(f"{prefix}-{n}") for n in range(count)]
