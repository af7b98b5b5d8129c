"""Careful operators: a job on hold, recoveries that wait for a word, a job that is only observed, and wishes.

A real orchestrator, a real agent and real processes; the operator's words go through the command line's own
grammar.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import redis.asyncio as redis

from relight.agents.node.config import NodeFile
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.bus.follow import Decided, Follower
from relight.events.bus.job import JobBus
from relight.events.decisions import (
    Alarm,
    Decision,
    RecoveryFinished,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
)
from relight.events.errors import UsageError
from relight.events.ids import EngineName
from relight.events.values import Phase
from relight.orchestrator import service
from relight.orchestrator.cli import parser, wish
from relight.orchestrator.settings import Settings, SettingsFile
from tests.node_support import E0, JOB, WITHIN_S, alive, engine, kill, node_file, record, role, running, swept

pytestmark = pytest.mark.anyio

E1 = EngineName("e1")
D = TypeVar("D", bound=Decision)


class Desk:
    """An operator's desk: what is decided, and how to say something."""

    def __init__(self, job: JobBus) -> None:
        self.job = job
        self.decided: list[Decision] = []
        self._follower = Follower(job)

    async def sees(self, kind: type[D], where: Callable[[D], bool] = lambda _: True) -> D:
        """The next decision of this kind; those before it are kept in `decided`."""
        with anyio.fail_after(WITHIN_S):
            while True:
                event = await self._follower.next()
                if isinstance(event, Decided):
                    self.decided.append(event.decision)
                    if isinstance(event.decision, kind) and where(event.decision):
                        return event.decision

    async def says(self, *words: str) -> None:
        args = parser.build().parse_args([*words, "--bus", self.job.bus.url])
        wished = wish.wish(args, self.job.name, await self.job.snapshot())
        await self.job.hint(wished.fact, source=wish.operator())

    async def routed(self, name: EngineName, incarnation: int) -> RouteAdded:
        return await self.sees(
            RouteAdded, lambda route: (route.engine, route.incarnation) == (name, incarnation)
        )

    async def phase(self, name: EngineName) -> Phase:
        return (await self.job.snapshot()).engines[name].phase


@asynccontextmanager
async def deciding(url: str, **settings: Any) -> AsyncIterator[None]:
    """An orchestrator in this process."""
    file = SettingsFile(Settings(**settings), {})
    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            await service.serve(bus_url=url, jobs=[JOB], settings=file)

        tasks.start_soon(serve)
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def working(server: Embedded, file: NodeFile, **settings: Any) -> AsyncIterator[Desk]:
    """A job whose engines serve."""
    with swept(file):
        async with open_bus(server.url) as bus, deciding(server.url, **settings), running(file, server.url):
            desk = Desk(bus.job(file.job))
            for _ in file.engines:
                await desk.sees(RouteAdded)
            yield desk


@pytest.fixture
def file(tmp_path: Path, stub_model: Path) -> NodeFile:
    return node_file(tmp_path / "state", engine(stub_model))


async def test_on_hold_nothing_is_done_until_the_job_is_released(server: Embedded, file: NodeFile) -> None:
    async with working(server, file) as desk:
        await desk.says("hold", JOB)
        frozen = role(file, "leader")
        kill(role(file, "core"))
        fence = await desk.sees(RouteFenced)
        stop = await desk.sees(StopEngine)
        assert not fence.dry_run and stop.dry_run
        await desk.says("drain", E0)
        again = await desk.sees(StopEngine)
        assert again.dry_run and again.then == "drained"
        assert alive(frozen) and record(file).phase == "up"
        await desk.says("release", E0)
        await desk.sees(StopEngine, lambda order: order.dry_run and order.then == "restart")
        await desk.says("release", "--job", JOB)
        assert not (await desk.sees(StopEngine)).dry_run
        await desk.routed(E0, 2)


async def test_a_recovery_waits_for_its_approval(server: Embedded, file: NodeFile) -> None:
    async with working(server, file, mode="approve") as desk:
        with pytest.raises(UsageError, match="no recovery 'e0' that waits for an approval; waiting: none"):
            await desk.says("approve", E0)
        kill(role(file, "core"))
        alarm = await desk.sees(Alarm)
        assert alarm.kind == "approval"
        assert (await desk.sees(StopEngine)).dry_run
        recovery = (await desk.job.snapshot()).engines[E0].recovery
        assert recovery is not None and f"relight approve {recovery.id}" in alarm.detail
        await desk.says("approve", recovery.id)
        assert not (await desk.sees(StopEngine)).dry_run
        done = await desk.sees(RecoveryFinished)
        assert done.outcome == "done" and done.recovery == recovery.id


async def test_what_is_only_observed_is_published_and_not_done(server: Embedded, file: NodeFile) -> None:
    with swept(file):
        async with open_bus(server.url) as bus, running(file, server.url):
            desk = Desk(bus.job(JOB))
            async with deciding(server.url):
                await desk.routed(E0, 1)
            desk.decided.clear()
            async with deciding(server.url, mode="observe"):
                await desk.sees(Alarm, lambda alarm: alarm.kind == "settings")
                left = role(file, "leader")
                kill(role(file, "core"))
                await desk.sees(StopEngine)
                assert all(decision.dry_run for decision in desk.decided)
                assert alive(left) and record(file).phase == "up"
            async with deciding(server.url):
                await desk.sees(StopEngine, lambda order: not order.dry_run)
                await desk.routed(E0, 2)


async def test_every_engine_is_restarted_and_one_serves_throughout(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    both = node_file(tmp_path / "state", engine(stub_model), engine(stub_model, name="e1"))
    async with working(server, both) as desk:
        await desk.says("restart", "--all")
        await desk.sees(RecoveryFinished)
        await desk.sees(RecoveryFinished)
        told = [
            (type(each).__name__, each.engine, each.incarnation)
            for each in desk.decided
            if isinstance(each, RouteFenced | RouteAdded)
        ]
        assert told[-4:] == [
            ("RouteFenced", E0, 1),
            ("RouteAdded", E0, 2),
            ("RouteFenced", E1, 1),
            ("RouteAdded", E1, 2),
        ]


async def test_what_an_operator_took_out_stays_out_when_the_bus_forgets_it(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    both = node_file(tmp_path / "state", engine(stub_model), engine(stub_model, name="e1"))
    async with working(server, both) as desk:
        await desk.says("drain", E0)
        await desk.sees(StopEngine)
        with anyio.fail_after(WITHIN_S):
            while await desk.phase(E0) is not Phase.STOPPED:
                await anyio.sleep(0.05)
        raw = redis.Redis.from_url(server.url)
        await raw.flushall()
        with contextlib.suppress(redis.ConnectionError):
            await raw.aclose()
        await desk.sees(RouteAdded, lambda route: route.engine == E1)
        assert await desk.phase(E0) is Phase.STOPPED
        await desk.says("release", E0)
        start = await desk.sees(StartEngine)
        assert (start.engine, start.incarnation) == (E0, 2)
