"""The orchestrator's loop on a real server: what it hears is committed once, whoever holds the lease."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import pytest

from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.bus.follow import Decided, Follower, Noted
from relight.events.bus.job import JobBus, Numbered, Pulse
from relight.events.decisions import (
    Decision,
    ReportRequested,
    RouteAdded,
    StartEngine,
    StopEngine,
    VerifyEngine,
)
from relight.events.facts import (
    DrainRequested,
    EngineDead,
    EngineStarted,
    EngineStopped,
    Fact,
    Healthy,
    NodeSilent,
    NodeUp,
    ReleaseRequested,
)
from relight.events.ids import BootId, EngineName, JobName, NodeName, Source
from relight.events.values import Cause, EngineReport, Phase, Process, Proof
from relight.events.version import BASE
from relight.orchestrator.service import serve
from relight.orchestrator.settings import Settings, SettingsFile

pytestmark = pytest.mark.anyio

D = TypeVar("D", bound=Decision)

JOB = JobName("grpo-1")
A = NodeName("a")
E0 = EngineName("e0")
WITHIN_S = 15.0


class Agent:
    """The facts of node a, as an agent would say them, and the decisions it hears."""

    def __init__(self, job: JobBus) -> None:
        self.job = job
        self.heard = Follower(job)
        self.seq = 0

    async def say(self, *facts: Fact) -> None:
        numbered = []
        for fact in facts:
            self.seq += 1
            numbered.append(Numbered(self.seq, fact, 0))
        await self.job.append(numbered, source=Source("agent/a"), boot=BootId("b"))

    async def hears(self, kind: type[D]) -> D:
        with anyio.fail_after(WITHIN_S):
            while True:
                match await self.heard.next():
                    case Decided(decision=decision) if isinstance(decision, kind):
                        return decision
                    case _:
                        continue

    async def up(self, incarnation: int, *, epoch: int, condition: str = "absent") -> None:
        report = EngineReport(engine=E0, incarnation=incarnation, state=condition)  # type: ignore[arg-type]
        await self.say(NodeUp(node=A, boot=BootId("b"), max_epoch=epoch, engines=(report,)))

    async def serves(self) -> None:
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
        assert (await self.hears(RouteAdded)).incarnation == start.incarnation


@asynccontextmanager
async def orchestrator(server: Embedded, settings: Settings | None = None) -> AsyncIterator[None]:
    """An orchestrator of its own, gone without a word at the end of the block."""
    async with anyio.create_task_group() as tasks:
        file = SettingsFile(settings or Settings(), {})

        async def run() -> None:
            await serve(bus_url=server.url, jobs=[JOB], settings=file)

        tasks.start_soon(run)
        yield
        tasks.cancel_scope.cancel()


async def test_an_engine_is_started_lost_and_given_back(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrator(server):
        agent = Agent(bus.job(JOB))
        await agent.up(0, epoch=0)
        await agent.serves()
        await agent.say(EngineDead(engine=E0, incarnation=1, cause=Cause.SIGNAL, signal=9))
        stop = await agent.hears(StopEngine)
        assert (stop.incarnation, stop.processes) == (1, (Process(7, 7),))
        await agent.say(EngineStopped(engine=E0, incarnation=1, node=A, proof=Proof(port_free=True)))
        await agent.serves()
        state = (await bus.job(JOB).snapshot()).engines[E0]
        assert (state.phase, state.incarnation) == (Phase.SERVING, 2)


async def test_a_successor_asks_before_it_acts_and_decides_under_a_higher_epoch(server: Embedded) -> None:
    async with open_bus(server.url) as bus:
        agent = Agent(bus.job(JOB))
        async with orchestrator(server):
            await agent.up(0, epoch=0)
            await agent.serves()
            await agent.say(EngineDead(engine=E0, incarnation=1, cause=Cause.EXIT))
            first = await agent.hears(StopEngine)
        async with orchestrator(server):
            asked = await agent.hears(ReportRequested)
            assert asked.epoch > first.epoch
            await agent.up(1, epoch=asked.epoch)
            again = await agent.hears(StopEngine)
            assert (again.epoch, again.incarnation) == (asked.epoch, 1)


async def test_what_cannot_be_decoded_is_parked_and_the_rest_goes_on(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrator(server):
        job = bus.job(JOB)
        commands = bus.reader()
        await commands.xadd(job.keys.facts, {"type": "Nonsense", "source": "x", "data": "{}"})
        await commands.xadd(job.keys.facts, {"type": "NodeUp", "source": "x", "data": '{"node": 3}'})
        await commands.xadd(job.keys.facts, {"hello": "world"})
        await commands.xadd(job.keys.facts, {"type": b"\xff", "data": b"\xff"})
        agent = Agent(job)
        await agent.up(0, epoch=0)
        await agent.hears(StartEngine)
        parked = await commands.xrange(job.keys.parked)
        reasons = [fields["reason"] for _, fields in parked]
        assert len(reasons) == 4
        assert "unknown type 'Nonsense'" in reasons[0]
        assert "$.node" in reasons[1]


async def test_a_node_whose_pulse_stands_still_is_fenced_and_its_return_is_verified(server: Embedded) -> None:
    settings = Settings(node_silence_s=1.5)
    async with open_bus(server.url) as bus, orchestrator(server, settings):
        job = bus.job(JOB)
        agent = Agent(job)
        await job.pulse(Source("agent/a"), Pulse(BootId("b"), 1))
        await agent.up(0, epoch=0)
        await agent.serves()
        with anyio.fail_after(WITHIN_S):
            while True:
                event = await agent.heard.next()
                if isinstance(event, Noted) and codec.is_fact(event.entry):
                    break
        assert isinstance(codec.decode_fact(event.entry), NodeSilent)
        epoch = (await job.snapshot()).epoch
        await job.pulse(Source("agent/a"), Pulse(BootId("b"), 2))
        report = EngineReport(engine=E0, incarnation=1, state="up", address="http://e0", version=BASE)
        await agent.say(NodeUp(node=A, boot=BootId("b"), max_epoch=epoch, engines=(report,)))
        assert (await agent.hears(VerifyEngine)).incarnation == 1


async def test_an_engine_is_drained_and_released(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrator(server):
        job = bus.job(JOB)
        agent = Agent(job)
        await agent.up(0, epoch=0)
        await agent.serves()
        await job.hint(DrainRequested(engine=E0), source=Source("operator/me"))
        stop = await agent.hears(StopEngine)
        assert (stop.then, stop.drain_s) == ("drained", Settings().drain_s)
        await agent.say(
            EngineStopped(engine=E0, incarnation=1, node=A, proof=Proof(port_free=True), answers=stop.id)
        )
        await job.hint(ReleaseRequested(engine=E0), source=Source("operator/me"))
        await agent.serves()
        assert (await job.snapshot()).engines[E0].incarnation == 2


async def test_an_epoch_that_an_agent_has_obeyed_is_never_issued_again(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrator(server):
        agent = Agent(bus.job(JOB))
        obeyed = await bus.tell_time() + 1_000_000_000
        await agent.up(0, epoch=obeyed)
        asked_or_started = await agent.hears(Decision)
        while asked_or_started.epoch <= obeyed:
            asked_or_started = await agent.hears(Decision)
        assert asked_or_started.epoch == obeyed + 1


async def test_two_orchestrators_take_turns(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrator(server):
        agent = Agent(bus.job(JOB))
        await agent.up(0, epoch=0)
        await agent.serves()
        epoch = (await bus.job(JOB).snapshot()).epoch
        async with orchestrator(server):
            await agent.say(EngineDead(engine=E0, incarnation=1, cause=Cause.EXIT))
            assert (await agent.hears(StopEngine)).epoch == epoch
