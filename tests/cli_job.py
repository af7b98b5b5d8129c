"""A job in the middle of a recovery, put on a bus as agents, trainer and orchestrator would."""

from typing import Any

from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.job import Commit, Numbered
from relight.events.decisions import Decision, LoadWeights, RouteFenced, StartEngine, StopEngine, SyncWeights
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Fact,
    NodeUp,
    RouteSuspected,
    WeightsPublished,
)
from relight.events.ids import (
    BEGINNING,
    BootId,
    DecisionId,
    EngineName,
    EntryId,
    JobName,
    NodeName,
    RecoveryId,
    Source,
    SyncId,
)
from relight.events.schema import Boundary, EngineState, Meta, NodeRecord, Recovery, Route
from relight.events.values import Cause, Member, Phase, Process, Proof, Weights
from relight.events.version import Version

NODE, BOOT = NodeName("node-a"), BootId("b1")
E0, E1 = EngineName("e0"), EngineName("e1")
AGENT, TRAINER, US = Source("agent/node-a"), Source("trainer/7"), Source("orchestrator/host-1")
V = Version(7, 4)
PROCESSES = (Process(11, 22), Process(12, 23))
RECOVERY = RecoveryId("r1")
SYNC = SyncId("s10")
PUBLISHED: dict[str, Any] = {"version": V, "uri": "/shared/7.4", "digest": "sha256:aa"}


class Recorder:
    """Says facts and commits decisions, one by one."""

    def __init__(self, bus: Bus, job: JobName) -> None:
        self.job = bus.job(job)
        self.clock = bus.clock
        self.serial = 0
        self.seq: dict[Source, int] = {}

    async def fact(self, fact: Fact, *, source: Source = AGENT) -> EntryId:
        self.seq[source] = self.seq.get(source, 0) + 1
        said = Numbered(self.seq[source], fact, self.clock.now_ms())
        await self.job.append([said], source=source, boot=BOOT)
        return (await self.job.tail(self.job.keys.facts, count=1))[0].entry_id

    async def decide(self, kind: type[Decision], *, recovery: bool = True, **fields: Any) -> DecisionId:
        self.serial += 1
        name = DecisionId(f"{self.lease.epoch}-{self.serial}")
        mine = {"recovery": RECOVERY} if recovery else {}
        decision = kind(id=name, epoch=self.lease.epoch, **mine, **fields)
        await self.commit(decision)
        return name

    async def commit(self, *decisions: Decision, **state: Any) -> None:
        self.number = (await self.job.snapshot()).commit + 1
        commit = Commit(number=self.number, cursor=BEGINNING, state=state, decisions=decisions)
        await self.job.commit(commit, lease=self.lease, source=US)

    async def begin(self) -> None:
        lease = await self.job.take_lease("host-1", ttl_ms=600_000)
        assert lease is not None
        self.lease = lease

    def deadline(self, seconds: int) -> int:
        return self.clock.now_ms() + seconds * 1000


async def record(bus_url: str, job: str = "grpo-1") -> None:
    """e0 was killed, is proven gone, was started again as e0.2 and waits for its weights; e1 serves."""
    async with open_bus(bus_url) as bus:
        await bus.enrol(JobName(job))
        story = Recorder(bus, JobName(job))
        await story.begin()
        await story.fact(NodeUp(node=NODE, boot=BOOT))
        cause = await story.fact(
            EngineDead(engine=E0, incarnation=1, cause=Cause.SIGNAL, signal=9, detect_ms=3.2)
        )
        killed = {"engine": E0, "incarnation": 1, "reason": "killed by signal 9", "cause": cause}
        await story.decide(RouteFenced, **killed)
        stop = await story.decide(
            StopEngine, node=NODE, processes=PROCESSES, deadline=story.deadline(30), **killed
        )
        proof = Proof(processes=PROCESSES, port=8000, port_free=True, took_ms=12.5)
        cause = await story.fact(
            EngineStopped(engine=E0, incarnation=1, node=NODE, proof=proof, answers=stop)
        )
        again = {"engine": E0, "incarnation": 2}
        start = await story.decide(
            StartEngine, node=NODE, reason="proven gone", cause=cause, deadline=story.deadline(60), **again
        )
        cause = await story.fact(
            EngineStarted(address="http://127.0.0.1:8001", processes=PROCESSES, answers=start, **again)
        )
        await story.decide(
            SyncWeights,
            recovery=False,
            reason="stale at an open boundary",
            cause=cause,
            sync=SYNC,
            run=7,
            boundary=10,
            version=V,
            members=(Member(E0, 2, "http://127.0.0.1:8001"),),
            deadline=story.deadline(300),
        )
        cause = await story.fact(WeightsPublished(sync=SYNC, **PUBLISHED), source=TRAINER)
        load: dict[str, Any] = {
            **PUBLISHED,
            "sync": SYNC,
            "reason": "the weights stand",
            "cause": cause,
            "deadline": story.deadline(120),
        }
        open_step = await story.decide(LoadWeights, **again, **load)
        await story.decide(LoadWeights, recovery=False, engine=E1, incarnation=4, **load)
        await story.fact(RouteSuspected(engine=E1, incarnation=4, error="reset"), source=Source("client/c"))
        await story.job.park(codec.entry("1-1", {"type": "Nonsense"}), "unknown type 'Nonsense'")
        order = LoadWeights(id=open_step, epoch=story.lease.epoch, recovery=RECOVERY, **again, **load)
        await story.commit(**dict(state(order, began=story.clock.now_ms() - 4_000)))


def state(order: LoadWeights, *, began: int) -> list[tuple[str, str]]:
    recovery = Recovery(id=RECOVERY, incarnation=1, why="killed by signal 9", began=began)
    lost = EngineState(
        phase=Phase.SYNCING, node=NODE, incarnation=2, address="http://x", intent=order, recovery=recovery
    )
    route = Route(address="http://127.0.0.1:8002", version=V)
    well = EngineState(phase=Phase.SERVING, node=NODE, incarnation=4, route=route, version=V)
    meta = Meta(
        birth="x",
        run=7,
        version=V,
        boundary=Boundary(run=7, boundary=10, step=4, exports=V),
        published=Weights(**PUBLISHED),
        counters={"late": 2},
        nodes={NodeName("node-b"): NodeRecord(boot=BOOT, silent=True)},
    )
    return [codec.encode_engine(E0, lost), codec.encode_engine(E1, well), codec.encode_meta(meta)]
