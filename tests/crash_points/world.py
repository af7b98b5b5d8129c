"""A job of real processes: server, orchestrator, agent, two stub engines, and a trainer that waits.

The orchestrator and the agent are victims, started again the moment they are dead. One engine is struck in
each case; the other one is a bystander. The trainer holds a boundary open, so that each recovery has its
weights synced again.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
import msgspec

from relight.agents.node import marks
from relight.events.bus.embedded import Embedded
from relight.events.bus.follow import reached
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable
from relight.events.ids import EngineName
from relight.events.schema import EngineState, Snapshot
from relight.events.values import Phase
from relight.orchestrator.cli.demo import processes
from tests.crash_points.layout import JOB, NODE
from tests.crash_points.lives import Service
from tests.crash_points.points import Case, Files, Pass, Plan, commits_done

SETTLE_S = 45.0
"""Longest recovery: two processes that die in it cost some seconds on a busy machine."""
UNHEARD_S = 10.0
POLL_S = 0.02
"""A commit without decisions wakes nobody who reads the stream."""
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Started(NamedTuple):
    """One life of an engine, by its own word."""

    engine: str
    incarnation: int
    pid: int
    tmpdir: str
    port: int


class Spoken(NamedTuple):
    """What an engine answers to somebody who is not the agent."""

    label: str
    checksums: dict[str, str]
    """Of each tensor, by its name without the worker's."""
    generation: Any


class World:
    """What `world` gives out while it is up."""

    def __init__(self, root: Path, *, server: Embedded, job: JobBus, http: aiohttp.ClientSession) -> None:
        self.root = root
        self.files = Files(root)
        self.server = server
        self.job = job
        self.http = http
        self.services: dict[str, Service] = {}
        self.case = 0
        self.kept = False
        """Whether the folder is left for people."""
        self.mark = f"relight.{marks.slot_id(JOB, state_dir=root / 'state')}"
        self.reference: Spoken

    # --- what is true now --------------------------------------------------------------------------

    def started(self) -> list[Started]:
        """Every life of every engine so far."""
        lives: list[Started] = []
        for line in (self.root / "lives").read_text().splitlines():
            tag, pid, tmpdir, port = line.split()
            engine, incarnation = tag.removeprefix(f"{self.mark}.").rsplit(".", 1)
            lives.append(Started(engine, int(incarnation), int(pid), tmpdir, int(port)))
        return lives

    def newest(self, engine: EngineName) -> Started:
        return [life for life in self.started() if life.engine == engine][-1]

    async def state(self) -> Snapshot:
        """The committed state; a server whose disk is busy may be silent for longer than a command waits."""
        return await reached(self.job, within_s=UNHEARD_S)

    async def until(self, what: str, right: Callable[[Snapshot], bool], within_s: float) -> Snapshot:
        """Wait for a committed state; raises TimeoutError."""
        with anyio.move_on_after(within_s):
            while True:
                found = await self.state()
                if right(found):
                    return found
                await anyio.sleep(POLL_S)
        raise TimeoutError(f"not within {within_s:g} s: {what}; {_shown(await self.state())}")

    async def at_rest(self) -> bool:
        """Everybody lives, has been heard, and serves, the bus too; nothing is open."""
        try:
            return await self._at_rest()
        except BusUnavailable:
            return False

    async def _at_rest(self) -> bool:
        snapshot = await self.job.snapshot()
        orchestrator, agent = self.services["orchestrator"], self.services["agent"]
        holder = await self.job.holder()
        if holder is None or f"-{orchestrator.pid}-" not in holder:
            return False
        if holder.partition(":")[0] != str(snapshot.epoch) or not all(map(serves, snapshot.engines.values())):
            return False
        if snapshot.meta is None or snapshot.meta.nodes[NODE].reported != snapshot.epoch:
            return False
        facts = await self.job.tail(self.job.keys.facts, count=200)
        reports = [each for each in facts if each.type == "NodeUp" and each.time >= agent.began_ms]
        return bool(reports) and facts[-1].entry_id == snapshot.cursor

    async def ask(self, address: str) -> Spoken:
        """What the engine at `address` says of its weights and makes of the prompt."""
        sampling = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        made = await self._post(
            address, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}
        )
        choice = made["choices"][0]
        async with self.http.get(f"{address}/weight_info") as answer:
            label = (await answer.json())["weight_version"]
        told = await self._post(address, "/weight_checker", {"action": "checksum"})
        named = {name.rpartition(":")[2]: digest for name, digest in told["checksums"].items()}
        return Spoken(label, named, (choice["token_ids"], choice["logprobs"]))

    async def _post(self, address: str, path: str, body: Any) -> Any:
        async with self.http.post(address + path, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {await answer.text()}")
            return await answer.json()

    # --- what is done to it ------------------------------------------------------------------------

    def commits_told(self) -> int:
        """How many commits of this case their callers have seen done."""
        lines = self.files.trace.read_bytes().splitlines() if self.files.trace.exists() else []
        passes = [msgspec.json.decode(line, type=Pass) for line in lines]
        return len(commits_done([each for each in passes if each.case == self.case]))

    def arm(self, deaths: Case) -> int:
        """A new case: points are counted from now on, and victims die at these."""
        self.case += 1
        self._write(Plan(self.case, deaths))
        return self.case

    def disarm(self) -> None:
        self._write(Plan(0))

    def _write(self, plan: Plan) -> None:
        fresh = self.files.plan.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(plan))
        fresh.replace(self.files.plan)

    def strike(self, life: Started) -> None:
        """SIGKILL to the core of that engine's life."""
        title = f"{self.mark}.{life.engine}.{life.incarnation}::EngineCore"
        (core,) = [each for each in processes.descendants(os.getpid()) if title in processes.title(each.pid)]
        fd = os.pidfd_open(core.pid)
        try:
            assert processes.alive(core)
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)

    async def end(self) -> list[str]:
        """Stop the agent with its engines, then the orchestrator; what is left, or did not end so.

        Whoever died last is back before: a process that has only begun ends by the signal.
        """
        with anyio.move_on_after(SETTLE_S):
            while not await self.at_rest():
                await anyio.sleep(POLL_S)
        for name in ("agent", "orchestrator"):
            await self.services[name].stop()
        codes = {name: self.services[name].lives[-1].code for name in ("agent", "orchestrator")}
        left = [f"{name} ended with code {code}" for name, code in codes.items() if code != 0]
        left += self.living()
        left += [text for life in self.started() for text in left_of(self, life)]
        return left + [f"folder {path}" for path in (self.root / "tmp").iterdir()]

    def living(self) -> list[str]:
        """Processes that bear this world's mark, in their title or in their environment."""
        found: list[str] = []
        for each in processes.descendants(os.getpid()):
            try:
                environment = Path("/proc", str(each.pid), "environ").read_bytes()
            except OSError:
                continue
            if f"{self.mark}." in environment.decode("latin1") + processes.title(each.pid):
                found.append(f"process {each.pid} {processes.title(each.pid)[:80]}")
        return found

    def sweep(self) -> None:
        """Kill whatever is left; for a world that failed."""
        for service in self.services.values():
            service.kill()
        deadline = time.monotonic() + 5.0
        while (left := self.living()) and time.monotonic() < deadline:
            for text in left:
                try:
                    os.kill(int(text.split()[1]), signal.SIGKILL)
                except ProcessLookupError:
                    continue


def left_of(world: World, life: Started) -> list[str]:
    """What one ended life has left behind, its processes aside."""
    tag = f"{world.mark}.{life.engine}.{life.incarnation}"
    found = [f"folder {life.tmpdir}"] if Path(life.tmpdir).exists() else []
    found += [f"segment {path}" for path in Path("/dev/shm").glob(f"psm_{tag}_*")]
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = {int(row.split()[1].split(":")[1], 16) for row in table if row.split()[3] == "0A"}
    return found + ([f"port {life.port}"] if life.port in listening else [])


def serves(engine: EngineState) -> bool:
    return (
        engine.phase is Phase.SERVING
        and engine.route is not None
        and engine.intent is engine.recovery is None
    )


def _shown(snapshot: Snapshot) -> str:
    return "; ".join(
        f"{name}.{each.incarnation} {each.phase} intent={type(each.intent).__name__}"
        for name, each in snapshot.engines.items()
    )
