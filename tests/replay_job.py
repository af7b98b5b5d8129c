"""A job for the replay tests: a real bus, and the orchestrator's part spoken by hand through its own door."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.job import Commit, JobBus, Lease
from relight.events.decisions import Decision, LoadWeights, RouteAdded, RouteFenced, SyncWeights
from relight.events.envelope import Entry
from relight.events.facts import RouteSuspected
from relight.events.ids import BEGINNING, DecisionId, EngineName, EntryId, JobName, NodeName, Source, SyncId
from relight.events.schema import EngineState, Meta, Route
from relight.events.values import Member, Phase
from relight.events.version import Version

JOB = JobName("job")
V1, V2 = Version(7, 1), Version(7, 2)
E0, E1, E2 = EngineName("e0"), EngineName("e1"), EngineName("e2")


class Orchestrator:
    """Commits routes and fences, state and decision in one step, as the real one does."""

    def __init__(self, bus: Bus, job: JobBus, lease: Lease, stamp: str) -> None:
        self.job = job
        self._reader = bus.reader()
        self._lease = lease
        self.stamp = stamp
        self._commits = 0
        self._serial = 0
        self._facts = EntryId(BEGINNING)

    def said(self) -> dict[str, Any]:
        """The fields that every decision has."""
        self._serial += 1
        return {
            "id": DecisionId(f"{self._lease.epoch}-{self._serial}"),
            "epoch": self._lease.epoch,
            "reason": "the test says so",
        }

    async def commit(self, *decisions: Decision, state: dict[str, str] | None = None) -> None:
        self._commits += 1
        meta = dict([codec.encode_meta(Meta(birth="b", bus=self.stamp))])
        commit = Commit(
            number=self._commits, cursor=BEGINNING, state={**meta, **(state or {})}, decisions=decisions
        )
        await self.job.commit(commit, lease=self._lease, source=Source("orchestrator/test"))

    async def route(self, engine: EngineName, incarnation: int, port: int, *, version: Version = V1) -> None:
        address = f"http://127.0.0.1:{port}"
        state = EngineState(
            phase=Phase.SERVING,
            node=NodeName("a"),
            incarnation=incarnation,
            address=address,
            route=Route(address=address, version=version),
            version=version,
        )
        decision = RouteAdded(
            engine=engine, incarnation=incarnation, address=address, version=version, **self.said()
        )
        await self.commit(decision, state=dict([codec.encode_engine(engine, state)]))

    async def fence(
        self, engine: EngineName, incarnation: int, *, drain_s: float = 0.0, planned: bool = False
    ) -> None:
        state = EngineState(phase=Phase.STOPPING, node=NodeName("a"), incarnation=incarnation)
        decision = RouteFenced(
            engine=engine, incarnation=incarnation, drain_s=drain_s, planned=planned, **self.said()
        )
        await self.commit(decision, state=dict([codec.encode_engine(engine, state)]))

    async def sync(self, engine: EngineName, incarnation: int, *, version: Version = V2) -> None:
        """Ask the trainer for weights, and the engine to load them."""
        await self.commit(
            SyncWeights(
                sync=SyncId("s"),
                run=version.run,
                boundary=1,
                version=version,
                members=(Member(engine, incarnation, "http://x"),),
                deadline=0,
                **self.said(),
            ),
            LoadWeights(
                engine=engine,
                incarnation=incarnation,
                sync=SyncId("s"),
                version=version,
                uri="/w",
                digest="sha256:0",
                deadline=0,
                **self.said(),
            ),
        )

    async def suspicion(self) -> RouteSuspected:
        """The next hint of a client; the caller gives the deadline."""
        while True:
            entries: list[Entry] = await self.job.read_facts(
                self._facts, reader=self._reader, block_ms=1000, count=1
            )
            for entry in entries:
                self._facts = entry.entry_id
                fact = codec.decode_fact(entry)
                if isinstance(fact, RouteSuspected):
                    return fact


@asynccontextmanager
async def orchestrator(url: str) -> AsyncGenerator[Orchestrator]:
    async with open_bus(url) as bus:
        job = bus.job(JOB)
        lease = await job.take_lease("test", ttl_ms=120_000)
        assert lease is not None
        yield Orchestrator(bus, job, lease, await bus.stamp())
