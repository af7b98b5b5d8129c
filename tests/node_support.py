"""Playing the orchestrator to a real agent, and looking at the processes that it is to own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import anyio

from relight.agents import snapshot
from relight.agents.node import agent, marks, proc
from relight.agents.node.config import Engine, NodeFile, checked
from relight.agents.node.record import Record
from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.job import Commit, JobBus, Lease
from relight.events.decisions import Decision, LoadWeights, ProbeEngine, StartEngine, StopEngine, VerifyEngine
from relight.events.errors import BusUnavailable
from relight.events.facts import EngineStarted, Fact, NodeUp
from relight.events.ids import BEGINNING, DecisionId, EngineName, JobName, NodeName, Source
from relight.events.schema import EngineState, Meta
from relight.events.values import Process
from relight.events.version import Version
from tests.conftest import write_model

JOB = JobName("job-1")
NODE = NodeName("node-a")
E0 = EngineName("e0")
WITHIN_S = 15.0
F = TypeVar("F", bound=Fact)


def engine(model: Path, *knobs: str, name: str = "e0", **changes: Any) -> Engine:
    """A stub engine of a node file."""
    command = (sys.executable, "-m", "relight.agents.stub", "--model", str(model))
    command += ("--host", "127.0.0.1", "--port", "{port}", *knobs)
    return Engine(**{"name": EngineName(name), "command": command, **changes})


def node_file(state: Path, *engines: Engine, job: JobName = JOB, node: NodeName = NODE) -> NodeFile:
    return checked(NodeFile(job=job, node=node, state_dir=str(state), engines=engines), where="test")


class Player:
    """An orchestrator in a test's hands: it decides what the test says and reads all facts."""

    def __init__(self, job: JobBus, lease: Lease) -> None:
        self.job = job
        self.lease = lease
        self.facts: list[Fact] = []
        self._cursor = BEGINNING
        self._commits = 0
        self._serial = 0
        self._reader = job.bus.reader()

    async def decide(
        self, *decisions: Decision | Fact, meta: Meta | None = None, **state: EngineState
    ) -> None:
        self._commits += 1
        fields = dict(codec.encode_engine(EngineName(name), value) for name, value in state.items())
        if self._commits == 1 or meta is not None:
            fields["meta"] = codec.to_json(meta or Meta(birth="test"))
        commit = Commit(number=self._commits, cursor=self._cursor, state=fields, decisions=decisions)
        await self.job.commit(commit, lease=self.lease, source=Source("orchestrator/test"))

    def head(self, **changes: Any) -> dict[str, Any]:
        """The fields that every decision has."""
        self._serial += 1
        decision = DecisionId(f"{self.lease.epoch}-{self._serial}")
        return {"id": decision, "epoch": self.lease.epoch, "reason": "test", **changes}

    def deadline(self, seconds: float = WITHIN_S) -> int:
        return self.job.bus.clock.now_ms() + int(seconds * 1000)

    def _of(self, incarnation: int, engine: EngineName, seconds: float) -> dict[str, Any]:
        deadline = self.deadline(seconds)
        return {**self.head(), "engine": engine, "incarnation": incarnation, "deadline": deadline}

    def start(
        self, incarnation: int = 1, *, engine: EngineName = E0, seconds: float = WITHIN_S, **more: Any
    ) -> StartEngine:
        return StartEngine(node=NODE, **self._of(incarnation, engine, seconds), **more)

    def stop(
        self, incarnation: int = 1, *, engine: EngineName = E0, seconds: float = WITHIN_S, **more: Any
    ) -> StopEngine:
        return StopEngine(node=NODE, **self._of(incarnation, engine, seconds), **more)

    def probe(
        self, incarnation: int = 1, *, engine: EngineName = E0, seconds: float = WITHIN_S
    ) -> ProbeEngine:
        return ProbeEngine(**self._of(incarnation, engine, seconds))

    def verify(
        self,
        version: Version,
        incarnation: int = 1,
        *,
        engine: EngineName = E0,
        seconds: float = WITHIN_S,
        **more: Any,
    ) -> VerifyEngine:
        return VerifyEngine(version=version, **self._of(incarnation, engine, seconds), **more)

    def load(
        self,
        version: Version,
        uri: str,
        digest: str,
        incarnation: int = 1,
        *,
        engine: EngineName = E0,
        seconds: float = WITHIN_S,
    ) -> LoadWeights:
        return LoadWeights(version=version, uri=uri, digest=digest, **self._of(incarnation, engine, seconds))

    async def wait(
        self, kind: type[F], where: Callable[[F], bool] = lambda _: True, *, within_s: float = WITHIN_S
    ) -> F:
        """The next fact of this kind; those before it are kept in `facts`."""
        with anyio.fail_after(within_s):
            while True:
                entries = await self.job.read_facts(self._cursor, reader=self._reader, block_ms=200, count=1)
                for entry in entries:
                    self._cursor = entry.entry_id
                    fact = codec.decode_fact(entry)
                    self.facts.append(fact)
                    if isinstance(fact, kind) and where(fact):
                        return fact

    async def ask(self, kind: type[F], decision: Decision, *, within_s: float = WITHIN_S) -> F:
        """Commit a decision and wait for the fact that answers it."""
        await self.decide(decision)
        return await self.wait(
            kind, lambda fact: getattr(fact, "answers", decision.id) == decision.id, within_s=within_s
        )

    def seen(self, kind: type[F]) -> list[F]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


@asynccontextmanager
async def playing(url: str, *, job: JobName = JOB) -> AsyncIterator[Player]:
    async with open_bus(url) as bus:
        its = bus.job(job)
        lease = await its.take_lease("test", ttl_ms=600_000)
        assert lease is not None
        player = Player(its, lease)
        await player.decide()
        try:
            yield player
        finally:
            with contextlib.suppress(BusUnavailable):
                await its.release_lease(lease)


@asynccontextmanager
async def running(file: NodeFile, url: str, *, stop_engines: bool = True) -> AsyncIterator[None]:
    """An agent in this process; its engines are gone afterwards unless told otherwise."""

    async def served() -> None:
        await agent.serve(file, bus_url=url, stop_engines=stop_engines)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(served)
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def directing(file: NodeFile, url: str) -> AsyncIterator[Player]:
    """A player and an agent that has reported; nothing of its engines is left afterwards."""
    with swept(file):
        async with playing(url, job=file.job) as player, running(file, url):
            await player.wait(NodeUp)
            yield player


@contextmanager
def agent_process(file: NodeFile, url: str, config: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """An agent as a process of its own; killed afterwards, its engines are the test's."""
    config.write_bytes(codec.to_json(file).encode())
    code = (
        "import sys, anyio; from functools import partial; from pathlib import Path;"
        "from relight.agents.node import agent, config; from relight.events import codec;"
        "import logging; logging.basicConfig(level=10 if '-v' in sys.argv else 30);"
        "f = codec.from_json(Path(sys.argv[1]).read_bytes(), config.NodeFile);"
        "anyio.run(partial(agent.serve, f, bus_url=sys.argv[2], stop_engines=False))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(config), url], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def write_snapshot(folder: Path, version: Version, *, seed: int) -> tuple[str, str]:
    """Weights that `seed` decides, as a trainer hands them over: their URI and digest."""
    write_model(folder, seed=seed)
    manifest = snapshot.describe(folder, version)
    (folder / snapshot.MANIFEST).write_bytes(snapshot.encoded(manifest))
    return str(folder), snapshot.digest_of(manifest)


async def post(started: EngineStarted, path: str, body: Any = None) -> Any:
    """What an engine answers to a call of somebody who is not the agent."""
    async with aiohttp.ClientSession() as http, http.post(started.address + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@asynccontextmanager
async def generating(started: EngineStarted, *, tokens: int) -> AsyncIterator[None]:
    """A client's call that runs meanwhile and is broken off at the end."""
    sampling = {"max_tokens": tokens, "ignore_eos": True}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling, "stream": False}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(post, started, "/inference/v1/generate", body)
        yield
        tasks.cancel_scope.cancel()


async def knobs(started: EngineStarted, **changes: Any) -> None:
    """Set faults of a running stub."""
    await post(started, "/stub/knobs", changes)


def record(file: NodeFile, name: EngineName = E0) -> Record:
    return codec.from_json((file.state_path / "engines" / name / "record.json").read_bytes(), Record)


def alive(process: Process) -> bool:
    return proc.liveness(process) is proc.Liveness.ALIVE


def role(file: NodeFile, wanted: str, name: EngineName = E0) -> Process:
    """The recorded process with this role."""
    return next(member.process for member in record(file, name).members if member.role == wanted)


def kill(process: Process) -> None:
    """SIGKILL exactly this process."""
    fd = os.pidfd_open(process.pid)
    try:
        stat = proc.read_stat(process.pid)
        assert stat is not None and stat.start == process.start
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    finally:
        os.close(fd)


@contextmanager
def swept(file: NodeFile) -> Iterator[None]:
    """Whatever a test leaves of its engines is killed, by tag."""
    try:
        yield
    finally:
        slot = marks.slot_id(file.job, state_dir=file.state_path)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            left = [p for each in file.engines for ps in marks.family(slot, each.name).values() for p in ps]
            if not left:
                break
            for process in left:
                kill(process)
            time.sleep(0.01)
        for segment in Path("/dev/shm").glob(f"psm_relight.{slot}.*"):
            segment.unlink()
        for each in file.engines:
            for incarnation in range(1, 10):
                tag = marks.tag_of(slot, each.name, incarnation)
                shutil.rmtree(marks.folder_of(tag), ignore_errors=True)
