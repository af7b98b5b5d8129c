"""The orchestrator's loop on a real server: what it hears is committed once, whoever holds the lease."""

import anyio
import pytest

from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.bus.follow import Noted
from relight.events.bus.job import Pulse
from relight.events.decisions import Decision, ReportRequested, StartEngine, StopEngine, VerifyEngine
from relight.events.facts import (
    DrainRequested,
    EngineDead,
    EngineStopped,
    NodeSilent,
    NodeUp,
    ReleaseRequested,
)
from relight.events.ids import BootId, Source
from relight.events.values import Cause, EngineReport, Phase, Process, Proof
from relight.events.version import BASE
from relight.orchestrator.settings import Settings
from tests.orchestrator_support import E0, JOB, WITHIN_S, A, Agent, orchestrating

pytestmark = pytest.mark.anyio


async def test_an_engine_is_started_lost_and_given_back(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrating(server.url):
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
        async with orchestrating(server.url):
            await agent.up(0, epoch=0)
            await agent.serves()
            await agent.say(EngineDead(engine=E0, incarnation=1, cause=Cause.EXIT))
            first = await agent.hears(StopEngine)
        async with orchestrating(server.url):
            asked = await agent.hears(ReportRequested)
            assert asked.epoch > first.epoch
            await agent.up(1, epoch=asked.epoch)
            again = await agent.hears(StopEngine)
            assert (again.epoch, again.incarnation) == (asked.epoch, 1)


async def test_what_cannot_be_decoded_is_parked_and_the_rest_goes_on(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrating(server.url):
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
    async with open_bus(server.url) as bus, orchestrating(server.url, settings=settings):
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
    async with open_bus(server.url) as bus, orchestrating(server.url):
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
    async with open_bus(server.url) as bus, orchestrating(server.url):
        agent = Agent(bus.job(JOB))
        obeyed = await bus.tell_time() + 1_000_000_000
        await agent.up(0, epoch=obeyed)
        asked_or_started = await agent.hears(Decision)
        while asked_or_started.epoch <= obeyed:
            asked_or_started = await agent.hears(Decision)
        assert asked_or_started.epoch == obeyed + 1


async def test_two_orchestrators_take_turns(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrating(server.url):
        agent = Agent(bus.job(JOB))
        await agent.up(0, epoch=0)
        await agent.serves()
        epoch = (await bus.job(JOB).snapshot()).epoch
        async with orchestrating(server.url):
            await agent.say(EngineDead(engine=E0, incarnation=1, cause=Cause.EXIT))
            assert (await agent.hears(StopEngine)).epoch == epoch
