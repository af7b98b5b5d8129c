"""Who is judged by silence, and when nobody is: before all was read, after a stall, after an outage."""

import itertools
import os
import signal

import anyio
import pytest

from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.bus.follow import Follower, Noted, Synced
from relight.events.bus.job import JobBus, Lease, Numbered, Pulse
from relight.events.facts import NodeSilent, NodeUp, RouteSuspected, TrainerSilent
from relight.events.ids import BEGINNING, BootId, EngineName, JobName, Source
from relight.events.schema import EngineState, Meta, NodeRecord
from relight.orchestrator.core.job import Job
from relight.orchestrator.settings import Settings
from relight.orchestrator.silence import Silence
from relight.orchestrator.sources import GONE_S, Sources
from relight.orchestrator.tenure import STALL_S, Tenure
from tests.orchestrator_support import E0, WITHIN_S, A, orchestrating, renewed, until

JOB = JobName("grpo-1")
BOOT = BootId("b")
AGENT, TRAINER = Source("agent/a"), Source("trainer/7")
SETTINGS = Settings(node_silence_s=10.0, trainer_silence_s=30.0)
WATCHED = Job(1, SETTINGS, Meta(birth="x", run=7, nodes={A: NodeRecord(boot=BOOT)}), {})


def pulse(seq: int) -> dict[Source, Pulse]:
    return {AGENT: Pulse(BOOT, seq), TRAINER: Pulse(BOOT, seq)}


def judged(silence: Silence, seq: int, *, now_s: float) -> set[type]:
    return {type(fact) for fact in silence.judge(WATCHED, pulse(seq), now_s=now_s, now=0)}


def test_each_is_judged_by_its_own_time_since_its_number_last_advanced() -> None:
    silence = Silence()
    assert judged(silence, 1, now_s=100.0) == set()
    assert judged(silence, 2, now_s=105.0) == set()
    assert judged(silence, 2, now_s=115.0) == set()
    assert judged(silence, 2, now_s=115.1) == {NodeSilent}
    assert judged(silence, 2, now_s=135.1) == {NodeSilent, TrainerSilent}
    assert judged(silence, 3, now_s=136.0) == set()


def test_whoever_is_forgiven_has_a_fresh_period() -> None:
    silence = Silence()
    judged(silence, 1, now_s=100.0)
    silence.forgive()
    assert judged(silence, 1, now_s=150.0) == set()
    assert judged(silence, 1, now_s=160.1) == {NodeSilent}


@pytest.mark.anyio
async def test_a_stall_or_an_outage_is_told_with_the_next_look_once() -> None:
    tenure = Tenure(JOB, Lease("me", 1), SETTINGS, stamp="none", asked_at_s=0.0)
    tenure.saw(pulse(1), now_s=1.0)
    assert (tenure.sight().blind, tenure.sight().pulses) == (False, None)
    tenure.saw(pulse(1), now_s=1.0 + STALL_S + 0.1)
    assert tenure.sight().blind
    tenure.saw(pulse(1), now_s=6.0)
    assert not tenure.sight().blind
    tenure.saw(pulse(1), now_s=6.5)
    tenure.saw_nothing()
    assert tenure.sight().pulses is None  # those of before the outage are no moment to count from
    tenure.saw(pulse(1), now_s=7.0)
    assert tenure.sight().blind
    tenure.saw(pulse(1), now_s=8.0)
    assert not tenure.sight().blind


def test_an_agent_is_forgotten_when_it_is_gone_for_long_and_left_no_engine() -> None:
    sources, seen = Sources(), {AGENT: "5:b"}
    assert sources.gone(WATCHED, seen=seen, pulses={}, now_s=0.0) == {}
    assert sources.gone(WATCHED, seen=seen, pulses={}, now_s=GONE_S) == {}
    assert sources.gone(WATCHED, seen=seen, pulses={}, now_s=GONE_S + 1) == {AGENT: "5:b"}
    assert sources.gone(WATCHED, seen={AGENT: "6:b"}, pulses={}, now_s=GONE_S + 2) == {}


def test_an_agent_that_is_cut_off_is_never_forgotten_while_the_state_knows_its_engine() -> None:
    sources, seen = Sources(), {AGENT: "5:b"}
    cut_off = WATCHED._replace(engines={E0: EngineState(node=A)})
    for now_s in (0.0, GONE_S + 1, 100 * GONE_S):
        assert sources.gone(cut_off, seen=seen, pulses={}, now_s=now_s) == {}


# --- on a real server ------------------------------------------------------------------------------


async def known(job: JobBus, settings: Settings) -> None:
    """Node a stands in the state."""
    async with orchestrating(job.bus.url, settings=settings):
        await job.append([Numbered(1, NodeUp(node=A, boot=BOOT), 0)], source=AGENT, boot=BOOT)
        await until(lambda: has_node(job))


async def has_node(job: JobBus) -> bool:
    meta = (await job.snapshot()).meta
    return meta is not None and A in meta.nodes


async def pulses(job: JobBus) -> None:
    """The agent's, until cancelled."""
    for seq in itertools.count():
        await job.pulse(AGENT, Pulse(BOOT, seq))
        await anyio.sleep(0.2)


async def silences(job: JobBus) -> list[NodeSilent]:
    entries = await job.read_decisions(BEGINNING, count=10_000)
    facts = [codec.decode_fact(entry) for entry in entries if codec.is_fact(entry)]
    return [fact for fact in facts if isinstance(fact, NodeSilent)]


@pytest.mark.anyio
async def test_what_was_said_meanwhile_is_read_before_anybody_is_judged(server: Embedded) -> None:
    at_once = Settings(node_silence_s=0.0, lease_s=1.0)
    async with open_bus(server.url) as bus:
        job = bus.job(JOB)
        await known(job, Settings())
        heard = Follower(job)
        assert isinstance(await heard.next(), Synced)
        hint = RouteSuspected(engine=EngineName("nobody"), incarnation=1, error="x")
        for first in range(0, 6000, 200):
            said = [Numbered(first + n + 1, hint, 0) for n in range(200)]
            await job.append(said, source=Source("agent/z"), boot=BOOT)
        [last] = await job.tail(job.keys.facts, count=1)
        async with orchestrating(server.url, settings=at_once):
            with anyio.fail_after(WITHIN_S):
                while not isinstance(await heard.next(), Noted):
                    pass
        assert (await job.snapshot()).cursor == last.entry_id


@pytest.mark.anyio
async def test_an_outage_within_the_lease_starts_everybodys_grace_anew(server: Embedded) -> None:
    settings = Settings(node_silence_s=3.0, lease_s=30.0)
    outage_s = 2.5  # longer than a command's time-out, shorter than a silence
    async with open_bus(server.url) as bus:
        job = bus.job(JOB)
        async with orchestrating(server.url, settings=settings):
            await job.append([Numbered(1, NodeUp(node=A, boot=BOOT), 0)], source=AGENT, boot=BOOT)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pulses, job)
                await until(lambda: has_node(job))
                for _ in range(2):  # it has been seen to pulse, and the term has judged by that
                    await renewed(bus.reader(), job)
                tasks.cancel_scope.cancel()
            epoch = (await job.snapshot()).epoch
            os.kill(server.process.pid, signal.SIGSTOP)
            await anyio.sleep(outage_s)
            os.kill(server.process.pid, signal.SIGCONT)
            back = await bus.tell_time()
            await until(lambda: silences(job))
            [silent] = await silences(job)
            assert silent.since > back - outage_s * 1000 / 2, "counted from before the outage"
            assert (await job.snapshot()).epoch == epoch
