"""Orchestrators for tests, in this process and in their own, and an agent to talk to them."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio

from relight.events.bus.follow import Decided, Follower, Synced
from relight.events.bus.job import JobBus, Numbered
from relight.events.decisions import Decision, RouteAdded, StartEngine, VerifyEngine
from relight.events.facts import EngineStarted, Fact, Healthy, NodeUp
from relight.events.ids import BootId, EngineName, JobName, NodeName, Source
from relight.events.values import EngineCondition, EngineReport, Process
from relight.events.version import BASE
from relight.orchestrator.service import serve
from relight.orchestrator.settings import Settings, SettingsFile

D = TypeVar("D", bound=Decision)

JOB = JobName("grpo-1")
A = NodeName("a")
E0 = EngineName("e0")
WITHIN_S = 20.0


class Agent:
    """The facts of node a, as an agent would say them, and the decisions it hears."""

    def __init__(self, job: JobBus) -> None:
        self.job = job
        self.heard = Follower(job)
        self.seq = 0

    async def say(self, *facts: Fact) -> None:
        if self.seq == 0:
            assert isinstance(await self.heard.next(), Synced)  # what is decided from now on is heard
        numbered = []
        for fact in facts:
            self.seq += 1
            numbered.append(Numbered(self.seq, fact, 0))
        await self.job.append(numbered, source=Source("agent/a"), boot=BootId("b"))

    async def hears(self, kind: type[D], *, above: int = 0) -> D:
        """The next decision of `kind` of an epoch above `above`."""
        with anyio.fail_after(WITHIN_S):
            while True:
                match await self.heard.next():
                    case Decided(decision=decision) if isinstance(decision, kind) and decision.epoch > above:
                        return decision
                    case _:
                        continue

    async def up(self, incarnation: int, *, epoch: int, condition: EngineCondition = "absent") -> None:
        report = EngineReport(engine=E0, incarnation=incarnation, state=condition)
        await self.say(NodeUp(node=A, boot=BootId("b"), max_epoch=epoch, engines=(report,)))

    async def serves(self) -> RouteAdded:
        """Play an engine's start up to its route."""
        start = await self.hears(StartEngine)
        await self.say(
            EngineStarted(
                engine=E0, incarnation=start.incarnation, address="http://e0", processes=(Process(7, 7),)
            )
        )
        verify = await self.hears(VerifyEngine)
        await self.say(
            Healthy(
                engine=E0, incarnation=start.incarnation, address="http://e0", version=BASE, answers=verify.id
            )
        )
        route = await self.hears(RouteAdded)
        assert route.incarnation == start.incarnation
        return route


@asynccontextmanager
async def orchestrating(
    url: str, *, jobs: Sequence[JobName] = (JOB,), settings: Settings | None = None
) -> AsyncIterator[None]:
    """An orchestrator in this process, for `jobs` (none: all), ended cleanly at the end of the block."""
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await serve(bus_url=url, jobs=jobs, settings=SettingsFile(settings or Settings(), {}))

        tasks.start_soon(run)
        yield
        tasks.cancel_scope.cancel()


class Orchestrator:
    """An orchestrator in a process of its own."""

    def __init__(self, url: str, log: Path, *options: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "relight.orchestrator.cli", "orchestrate", "--bus", url, *options]
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stderr=out)

    @property
    def pid(self) -> int:
        return self._process.pid

    def holds(self, lease: str | None) -> bool:
        """Whether `lease`, as it stands on the bus, is this process's."""
        return lease is not None and f"-{self.pid}-" in lease

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(WITHIN_S)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def is_running(self) -> bool:
        return self._process.poll() is None


@asynccontextmanager
async def processes(
    directory: Path, *urls: str, options: Sequence[str] = ()
) -> AsyncIterator[list[Orchestrator]]:
    """One orchestrator for each URL, in this order; all of them ended behind the block."""
    started = [Orchestrator(url, directory / f"{at}.log", *options) for at, url in enumerate(urls)]
    try:
        yield started
    finally:
        for one in started:
            if one.is_running():
                one.kill()


async def until(holds: Callable[[], object], *, within_s: float = WITHIN_S) -> None:
    """Return when `holds()`, awaited where it can be, is true."""
    with anyio.fail_after(within_s):
        while True:
            held = holds()
            if (await held) if hasattr(held, "__await__") else held:
                return
            await anyio.sleep(0.01)


async def renewed(raw: Any, job: JobBus) -> None:
    """Return when its lease lasts longer than it did the moment before."""
    left = await raw.pttl(job.keys.lease)
    with anyio.fail_after(WITHIN_S):
        while (now := await raw.pttl(job.keys.lease)) <= left:
            left = now
