"""Dashboards for tests, the jobs they show, and a reader of their live events."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import anyio

from relight.events import codec
from relight.events.bus.client import Bus
from relight.events.decisions import Alarm, RecoveryFinished, RouteFenced, StartEngine, StopEngine
from relight.events.facts import EngineDead, NodeUp
from relight.events.ids import BootId, DecisionId, EngineName, JobName, NodeName, RecoveryId, Source
from relight.events.schema import Boundary, EngineState, Meta, NodeRecord, Recovery, Route
from relight.events.values import Cause, Phase, Phases
from relight.events.version import Version
from relight.orchestrator.dashboard.serve import Settings, serve
from tests.cli_job import Recorder

WITHIN_S = 30.0
V = Version(7, 41)


class Event(NamedTuple):
    """One server-sent event."""

    name: str
    data: Any
    place: str | None


class Page:
    """A dashboard as programs see it."""

    def __init__(self, address: str, http: aiohttp.ClientSession) -> None:
        self.address = address
        self.http = http

    async def get(self, path: str, **headers: str) -> Any:
        async with self.http.get(self.address + path, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    @asynccontextmanager
    async def live(self, path: str, *, after: str | None = None) -> AsyncIterator[AsyncIterator[Event]]:
        """The live events of a path, from behind a place."""
        headers = {} if after is None else {"Last-Event-ID": after}
        async with self.http.get(self.address + path, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            yield events(answer)


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    fields: dict[str, str] = {}
    async for line in answer.content:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}


async def until(told: AsyncIterator[Event], name: str, holds: Any = lambda data: True) -> Event:
    """The next event of that name of which `holds` is true."""
    with anyio.fail_after(WITHIN_S):
        async for event in told:
            if event.name == name and holds(event.data):
                return event
    raise AssertionError(f"the events ended before {name}")


@asynccontextmanager
async def dashboard(url: str, **settings: Any) -> AsyncIterator[Page]:
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession(read_bufsize=1 << 22) as http:

        async def run(*, task_status: Any) -> None:
            chosen = Settings(**{"port": 0, **settings})
            await serve(bus_url=url, settings=chosen, task_status=task_status)

        port = await tasks.start(run)
        yield Page(f"http://127.0.0.1:{port}", http)
        tasks.cancel_scope.cancel()


# --- jobs ------------------------------------------------------------------------------------------

PHASES = {Phase.STARTING: 4, Phase.STALE: 3, Phase.VERIFYING: 1, Phase.STOPPING: 2, Phase.BACKOFF: 1}
"""How many engines of a large job are in other phases than SERVING, beside one each of the rarer ones."""


class LargeJob:
    """A job of many engines, as an orchestrator would commit it."""

    def __init__(self, bus: Bus, job: str, *, engines: int, troubled: bool = True) -> None:
        self.bus = bus
        self.name = JobName(job)
        self.story = Recorder(bus, self.name)
        self.troubled = troubled
        self.nodes = [NodeName(f"node-{n:02}") for n in range(-(-engines // 8))]
        self.names = [EngineName(f"{self.nodes[n // 8]}-{n % 8}") for n in range(engines)]

    async def put(self) -> None:
        """Enrol it, and commit its state and its history."""
        await self.bus.enrol(self.name)
        await self.story.begin()
        stamp = await self.bus.stamp()
        for node in self.nodes[:3]:
            await self.story.fact(NodeUp(node=node, boot=BootId("b1")), source=Source(f"agent/{node}"))
        await self.story.commit(**self.state(stamp))
        if self.troubled:
            for at, name in enumerate(self.names[:12]):
                await self.recovered(name, at)
            await self.alarm("waiting", f"{self.names[4]} waits for the trainer's next safe boundary")

    async def recovered(self, name: EngineName, at: int) -> None:
        """A recovery of `name`, from its death to its end."""
        recovery = RecoveryId(f"{name}.{at + 1}-{self.story.lease.epoch}-{at}")
        cause = await self.story.fact(
            EngineDead(engine=name, incarnation=at + 1, cause=Cause.SIGNAL, signal=9, detect_ms=3.0 + at)
        )
        of: dict[str, Any] = {"engine": name, "cause": cause}
        await self.decide(RouteFenced, recovery, incarnation=at + 1, reason="killed by signal 9", **of)
        until = self.story.deadline(30)
        node = self.nodes[0]
        await self.decide(
            StopEngine,
            recovery,
            incarnation=at + 1,
            reason="killed by signal 9",
            node=node,
            deadline=until,
            **of,
        )
        await self.decide(
            StartEngine, recovery, incarnation=at + 2, reason="proven gone", node=node, deadline=until, **of
        )
        times = {
            "fence": 4.0,
            "stop": 90.0 + 40 * at,
            "start": 2100.0 + 700 * (at % 5),
            "boundary": 300.0 * (at % 3),
        }
        times |= {"sync": 800.0 + 90 * at, "verify": 350.0, "route": 5.0}
        phases = Phases(detect=3.0 + at, total=sum(times.values()), **times)
        await self.decide(
            RecoveryFinished,
            recovery,
            incarnation=at + 2,
            reason=f"{name}.{at + 1} was lost: EngineDead: killed by signal 9",
            outcome="retired" if at == 7 else "done",
            phases=phases,
            **of,
        )

    async def decide(self, kind: Any, recovery: RecoveryId, **fields: Any) -> None:
        self.story.serial += 1
        name = DecisionId(f"{self.story.lease.epoch}-{self.story.serial}")
        await self.story.commit(kind(id=name, epoch=self.story.lease.epoch, recovery=recovery, **fields))

    async def alarm(self, kind: str, detail: str) -> None:
        self.story.serial += 1
        name = DecisionId(f"{self.story.lease.epoch}-{self.story.serial}")
        said = Alarm(id=name, epoch=self.story.lease.epoch, reason="look", kind=kind, detail=detail)
        await self.story.commit(said)

    def state(self, stamp: str) -> dict[str, str]:
        now = self.bus.clock.now_ms()
        meta = Meta(
            bus=stamp,
            birth="x",
            run=7,
            version=V,
            boundary=Boundary(run=7, boundary=10, step=41, exports=V),
            settings={"floor": max(1, len(self.names) // 2)},
            nodes={
                node: NodeRecord(
                    boot=BootId("b1"),
                    reported=self.story.lease.epoch,
                    silent=self.troubled and at == 5,
                    spares=at % 3,
                )
                for at, node in enumerate(self.nodes)
            },
        )
        phases = iter([phase for phase, many in PHASES.items() for _ in range(many)] if self.troubled else [])
        rare = dict(
            zip(self.names[-4:], (Phase.RETIRED, Phase.SILENT, Phase.DRAINING, Phase.STOPPED), strict=False)
        )
        fields = dict([codec.encode_meta(meta)])
        for at, name in enumerate(self.names):
            phase = next(phases, Phase.SERVING) if at % 6 == 2 else Phase.SERVING
            if self.troubled:
                phase = rare.get(name, phase)
            fields |= dict([codec.encode_engine(name, self.engine(at, phase, now))])
        return fields

    def engine(self, at: int, phase: Phase, now: int) -> EngineState:
        serving = phase in (Phase.SERVING, Phase.DRAINING)
        address = f"http://10.0.{at // 8}.{at % 8 + 10}:8000"
        recovery = None
        if phase in PHASES:
            recovery = Recovery(
                id=RecoveryId(f"{self.names[at]}.{at % 3 + 1}-1-{at}"),
                incarnation=at % 3 + 1,
                why="EngineDead: its core was killed by signal 9",
                detect_ms=4.0,
                began=now - 9_000 - 400 * at,
                marks={"fence": now - 9_000 - 399 * at, "stop": now - 8_000 - 350 * at},
                approved=at % 8 != 0,
            )
        return EngineState(
            phase=phase,
            node=self.nodes[at // 8],
            incarnation=at % 3 + 2,
            version=V if serving else None,
            route=Route(address=address, version=V) if phase is Phase.SERVING else None,
            since=now - 1000 * (at + 1),
            recovery=recovery,
            restarts=(now - 60_000,) * (at % 3),
            retired_because="its budget of 5 restarts in 15 minutes is spent"
            if phase is Phase.RETIRED
            else None,
            not_before=now + 14_000 if phase is Phase.BACKOFF else 0,
        )
