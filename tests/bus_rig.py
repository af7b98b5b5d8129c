"""A whole small job on a real bus (orchestrator, agent, two stub engines, a client that generates all the
time, a trainer that waits for it), and what no fault of the bus may do to it."""

import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import redis.asyncio as redis
from safetensors.numpy import load_file

import relight
from relight.agents.replay.client import ReplayClient
from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.embedded import Embedded, embedded, free_port
from relight.events.bus.job import JobBus
from relight.events.bus.streams import position
from relight.events.decisions import RouteAdded
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.facts import NodeSilent, RouteSuspected
from relight.events.ids import BEGINNING, EngineName, EntryId, JobName, NodeName, Source
from relight.events.schema import EngineState, Snapshot
from relight.events.values import Phase, Process
from relight.events.version import BASE
from relight.orchestrator.service import serve
from relight.orchestrator.settings import Settings, SettingsFile
from tests.node_support import agent, alive, engine, node_file, record, swept

log = logging.getLogger(__name__)

JOB = JobName("grpo-1")
E0, E1 = EngineName("e0"), EngineName("e1")
SILENCE_S = 2.5
SETTINGS = Settings(
    lease_s=1.0,
    node_silence_s=SILENCE_S,
    report_s=1.0,
    probe_s=5.0,
    verify_s=10.0,
    backoff_s=0.0,
    restarts=99,
)
WITHIN_S = 10.0
"""From the moment the bus serves again until the job is as it was; the start of an engine comes on top."""
START_S = 30.0

USER, PASSWORD = "relight", "s3cret-of-the-job"
ACL = ("on", f">{PASSWORD}", "~relight:*", "+@read", "+@write", "+@scripting", "+@connection")
ACL += ("-@dangerous", "+info", "+time")
"""The rights that docs/bus.md names."""

OPTIONS = ("--user", USER, *ACL, "--repl-diskless-sync-delay", "0")
"""Of every server."""


class Convergence(NamedTuple):
    """Seconds from "the bus serves again" to what it is named for."""

    commit_s: float
    fact_s: float
    well_s: float


class Rig:
    """The job, and what is true of it. `url` is its bus, `admin_url` the same with every right."""

    def __init__(self, directory: Path, model: Path, *, url: str, admin_url: str) -> None:
        self.url = url
        self.admin_url = admin_url
        self.weights = directory / "weights"
        self.model = model
        self.file = node_file(
            directory / "node", engine(model), engine(model, name=E1), job=JOB, node=NodeName("node-a")
        )
        self.turns = 0
        """Those that clients finished."""
        self.batches = 0
        """Those that the trainer was given."""
        self.failed: list[BaseException] = []
        """What ended a part of the job."""
        self.bus: Bus
        self.job: JobBus
        self.client: ReplayClient

    @asynccontextmanager
    async def works(self) -> AsyncIterator[None]:
        """The job up and serving; nothing of it is left behind the block."""
        with swept(self.file):
            async with open_bus(self.admin_url) as self.bus:
                self.job = self.bus.job(JOB)
                async with AsyncExitStack() as parts:
                    # One after the other: a first start gives up soon, and all share one event loop here.
                    await parts.enter_async_context(self._runs(self._orchestrator))
                    await self.until(self._has_orchestrator, within_s=START_S)
                    await parts.enter_async_context(self._runs(self._agent))
                    await self.until(self._has_engines, within_s=START_S)
                    await parts.enter_async_context(_training(self))
                    await self.until(self._has_version, within_s=START_S)
                    await self.until(self.is_well, within_s=START_S)
                    async with ReplayClient(self.url, job=JOB) as self.client, self._runs(self._generate):
                        yield
        assert not self.failed, self.failed

    async def _has_orchestrator(self) -> bool:
        return await self.job.holder() is not None

    async def _has_engines(self) -> bool:
        state = await self.state()
        return state is not None and all(self._is_routed(state.engines.get(name)) for name in (E0, E1))

    async def _has_version(self) -> bool:
        """Whether the trainer's first weights count."""
        state = await self.state()
        return state is not None and state.meta is not None and state.meta.version not in (None, BASE)

    @staticmethod
    def _is_routed(engine: EngineState | None) -> bool:
        return engine is not None and engine.phase is Phase.SERVING and engine.route is not None

    @asynccontextmanager
    async def _runs(self, part: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """A part of the job that lasts as long as the block; nothing may end it before."""

        async def last() -> None:
            try:
                await part()
            except Exception as error:  # noqa: BLE001 -- the test that waits is told
                self.failed.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(last)
            yield
            tasks.cancel_scope.cancel()

    async def _orchestrator(self) -> None:
        await serve(bus_url=self.url, jobs=[JOB], settings=SettingsFile(SETTINGS, {}))

    async def _agent(self) -> None:
        await agent.serve(self.file, bus_url=self.url, stop_engines=True)

    async def _generate(self) -> None:
        """Turns without end."""
        while True:
            turn = await self.client.generate(
                [1, 2, 3], {"max_tokens": 4, "ignore_eos": True}, timeout_s=60.0
            )
            assert turn.complete
            self.turns += 1
            await anyio.sleep(0.02)

    # --- what is true ------------------------------------------------------------------------------

    async def state(self) -> Snapshot | None:
        """The state, by the server's own user; none while it cannot be read."""
        with suppress(BusUnavailable, Undecodable):
            return await self.job.snapshot()
        return None

    async def is_well(self) -> bool:
        """Whether every engine is routed by a state that was written on the server as it stands."""
        with suppress(BusUnavailable, Undecodable):
            state, stamp = await self.job.snapshot(), await self.bus.stamp()
            routed = all(self._is_routed(state.engines.get(name)) for name in (E0, E1))
            return routed and state.meta is not None and state.meta.bus == stamp
        return False

    def processes(self, name: EngineName) -> tuple[int, tuple[Process, ...]]:
        """The engine's incarnation and processes, as its agent has them on disk."""
        known = record(self.file, name)
        return known.incarnation, tuple(member.process for member in known.members)

    async def decisions(self) -> list[Entry]:
        return await self.job.read_decisions(BEGINNING, count=10_000)

    async def facts(self) -> list[Entry]:
        return await self.job.read_facts(BEGINNING, count=10_000)

    # --- waiting -----------------------------------------------------------------------------------

    async def until(self, condition: Any, *, within_s: float = WITHIN_S) -> None:
        """Return when `condition`, a function or coroutine function, holds."""
        with anyio.fail_after(within_s):
            while True:
                assert not self.failed, self.failed
                held = condition()
                if (await held) if hasattr(held, "__await__") else held:
                    return
                await anyio.sleep(0.01)

    async def converges(self, *, fault: str, within_s: float = WITHIN_S) -> Convergence:
        """Call it when the bus serves again: how long until all is as it was. Fails after `within_s`."""
        began = time.monotonic()
        before = await self.state()
        seen: dict[str, float] = {}
        marker: EntryId | None = None
        with anyio.fail_after(within_s):
            while len(seen) < 3:
                if marker is None:
                    marker = await self._mark()
                state = await self.state()
                if state is not None:
                    if before is None or (state.epoch, state.commit) != (before.epoch, before.commit):
                        seen.setdefault("commit", time.monotonic() - began)
                    if marker is not None and position(state.cursor) >= position(marker):
                        seen.setdefault("fact", time.monotonic() - began)
                if await self.is_well():
                    seen.setdefault("well", time.monotonic() - began)
                elif "fact" not in seen:
                    seen.pop("well", None)
                await anyio.sleep(0.01)
        found = Convergence(seen["commit"], seen["fact"], max(seen.values()))
        log.info("converged fault=%r commit_s=%.2f fact_s=%.2f well_s=%.2f", fault, *found)
        return found

    async def _mark(self) -> EntryId | None:
        """A hint about an engine that is not there: it changes nothing but the cursor."""
        with suppress(BusUnavailable):
            hint = RouteSuspected(engine=EngineName("nobody"), incarnation=1, error="marker")
            return await self.job.hint(hint, source=Source("client/marker"))
        return None

    # --- invariants --------------------------------------------------------------------------------

    def assert_untouched(self, before: "dict[EngineName, tuple[int, tuple[Process, ...]]]") -> None:
        """The engines are the very processes they were."""
        for name, (incarnation, processes) in before.items():
            assert self.processes(name) == (incarnation, processes)
            assert all(alive(process) for process in processes)

    async def assert_no_wrong_word(self) -> None:
        """Nobody was judged silent, and every route said is one of an incarnation that is or was there."""
        highest = {name: self.processes(name)[0] for name in (E0, E1)}
        for entry in await self.decisions():
            assert entry.type != NodeSilent.__name__
            if entry.type == RouteAdded.__name__:
                decision = codec.decode_decision(entry)
                assert isinstance(decision, RouteAdded)
                assert decision.incarnation <= highest[decision.engine]


class OneServer(Rig):
    """The job on one server, with the server's own side of the bus, by which tests do it harm."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self.port = free_port()
        at = f"127.0.0.1:{self.port}"
        super().__init__(directory, model, url=f"redis://{USER}:{PASSWORD}@{at}", admin_url=f"redis://{at}")
        self.tidy = AsyncExitStack()
        """What is ended with the server."""
        self.server: Embedded
        self.raw: redis.Redis

    async def start_server(self, *options: str) -> None:
        """A server on the job's port and data; the one before has ended."""
        self.server = embedded(self.directory / "bus", port=self.port, options=(*OPTIONS, *options))
        await self.server.__aenter__()

    def kill_server(self) -> None:
        self.server.process.kill()
        self.server.process.wait(10)

    @asynccontextmanager
    async def works(self) -> AsyncIterator[None]:
        await self.start_server()
        try:
            async with self.tidy, super().works(), _raw(self.admin_url) as self.raw:
                yield
        finally:
            self.server.stop()


@asynccontextmanager
async def _training(job: Rig) -> AsyncIterator[None]:
    """A trainer whose first weights every engine has, and which then only waits for batches."""
    stop = threading.Event()

    def train() -> None:
        sync = relight.SnapshotSync(load_file(job.model / "model.safetensors"), job.weights)
        try:
            with relight.trainer(job.url, job=JOB, sync=sync) as trainer:
                trainer.sync(1)
                while not stop.is_set():
                    trainer.wait(lambda: stop.wait(0.05))
                    job.batches += 1
        except Exception as error:  # noqa: BLE001 -- the test that waits is told
            job.failed.append(error)

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.join, 30.0)


@asynccontextmanager
async def _raw(url: str) -> AsyncIterator["redis.Redis"]:
    """The server behind relight's back."""
    client = redis.Redis.from_url(url, decode_responses=True, protocol=2, socket_timeout=5.0)
    try:
        yield client
    finally:
        await client.aclose()


def warnings_of(records: Sequence[logging.LogRecord]) -> list[str]:
    """What the project said at warning or above."""
    ours = (each for each in records if each.name.startswith("relight") and each.levelno >= logging.WARNING)
    return [each.getMessage() for each in ours]
