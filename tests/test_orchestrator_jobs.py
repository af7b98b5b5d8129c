"""Many jobs, many orchestrators: who holds which, what one job may do to another, and what is left behind."""

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from relight.events import keys
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.embedded import Embedded
from relight.events.bus.job import JobBus, Numbered, Pulse
from relight.events.decisions import Alarm, ReportRequested, StartEngine, StopEngine
from relight.events.facts import EngineDead, EngineStopped, NodeUp, SafeBoundary
from relight.events.ids import BEGINNING, BootId, JobName, Source
from relight.events.values import Cause, Proof
from relight.events.version import Version
from relight.orchestrator import rounds
from relight.orchestrator.fairness import Lanes
from relight.orchestrator.peers import weight
from relight.orchestrator.service import Orchestrator
from relight.orchestrator.settings import DEFAULT, Settings
from relight.orchestrator.tenure import Tenure
from relight.orchestrator.term import Term
from tests.orchestrator_support import E0, JOB, A, Agent, orchestrating, renewed, until

pytestmark = pytest.mark.anyio

JOBS = [JobName(f"job-{n}") for n in range(24)]
RESTARTS = 1000
MOST = 10 ** sys.get_int_max_str_digits() - 1
"""The largest number that can be written down: the one after it fails whoever writes it."""


# --- spread ----------------------------------------------------------------------------------------


async def test_jobs_spread_over_the_orchestrators_that_are_there_and_none_moves_twice(
    server: Embedded,
) -> None:
    async with open_bus(server.url) as bus:
        for job in JOBS:
            await bus.enrol(job)
        async with orchestrating(server.url, jobs=()):
            await until(lambda: as_preferred(bus, 1))
            first = await bus.roll().holders([JOBS[0]])
            async with orchestrating(server.url, jobs=()):
                await until(lambda: as_preferred(bus, 2))
                moved = [holder != first[0] for holder in await bus.roll().holders(JOBS)]
                assert True in moved and False in moved
                assert await terms(bus) == [2 if once else 1 for once in moved]
            await until(lambda: as_preferred(bus, 1))
            assert set(await bus.roll().holders(JOBS)) == set(first)
            assert await terms(bus) == [3 if once else 1 for once in moved]
        assert await bus.roll().holders(JOBS) == [None] * len(JOBS)
        assert await bus.reader().exists(keys.ORCHESTRATORS) == 0


async def terms(bus: Bus) -> list[int]:
    """How many terms each job has seen: nothing else was committed."""
    return [(await bus.job(job).snapshot()).commit for job in JOBS]


async def as_preferred(bus: Bus, orchestrators: int) -> bool:
    """Whether each job is held, and committed, by whom rendezvous hashing prefers among so many."""
    there = await bus.reader().hkeys(keys.ORCHESTRATORS)
    preferred = [max(there, key=lambda name: weight(name, job)) for job in JOBS] if there else []
    if len(there) != orchestrators or await bus.roll().holders(JOBS) != preferred:
        return False
    held = [int(str(await bus.job(job).holder()).partition(":")[0]) for job in JOBS]
    return held == [(await bus.job(job).snapshot()).epoch for job in JOBS]


async def test_one_that_decides_for_some_jobs_is_left_no_others(server: Embedded) -> None:
    async with open_bus(server.url) as bus:
        for job in JOBS:
            await bus.enrol(job)
        async with orchestrating(server.url, jobs=JOBS[:2]):
            await until(lambda: all_held(bus, JOBS[:2]))
            async with orchestrating(server.url, jobs=()):
                await until(lambda: all_held(bus, JOBS))
                told = await bus.reader().hkeys(keys.ORCHESTRATORS)
                assert len(told) == 2
                assert len(set(await bus.roll().holders(JOBS[2:]))) == 1


async def all_held(bus: Bus, jobs: Sequence[JobName]) -> bool:
    return None not in await bus.roll().holders(jobs)


# --- one job's trouble -----------------------------------------------------------------------------


async def test_a_job_whose_terms_fail_is_tried_again_and_others_do_not_notice(
    server: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    well = JobName("well")
    async with open_bus(server.url) as bus, orchestrating(server.url, jobs=[JOB, well]):
        failing, other = Agent(bus.job(JOB)), Agent(bus.job(well))
        await other.up(0, epoch=0)
        epoch = (await other.serves()).epoch
        await failing.up(MOST, epoch=0)
        stop = await failing.hears(StopEngine)
        gone = EngineStopped(engine=E0, incarnation=MOST, node=A, proof=Proof(), answers=stop.id)
        await failing.say(gone)
        for failures in (1, 2, 3):
            await until(lambda count=failures: len(failures_in(caplog)) == count)  # type: ignore[misc]
            asked = await failing.hears(ReportRequested)
            await failing.up(MOST, epoch=asked.epoch)
        assert all(record.levelno == logging.ERROR and record.exc_info for record in failures_in(caplog))
        assert all(f"job={JOB}" in record.message for record in failures_in(caplog))
        await other.say(EngineDead(engine=E0, incarnation=1, cause=Cause.EXIT))
        assert (await other.hears(StopEngine)).epoch == epoch


def failures_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "term failed" in record.message]


async def test_an_entry_that_is_passed_over_is_parked_with_an_alarm(server: Embedded) -> None:
    async with open_bus(server.url) as bus:
        job = bus.job(JOB)
        await bus.tell_time()
        agent = Agent(job)
        await agent.up(MOST, epoch=0)
        [poison] = await job.read_facts(BEGINNING)
        await agent.up(0, epoch=0)
        lease = await job.take_lease("me", ttl_ms=60_000)
        assert lease is not None
        tenure = Tenure(JOB, lease, Settings(lease_s=60.0), stamp="none", asked_at_s=time.monotonic())
        term = Term(job, tenure, lanes=Lanes(), passed_over={poison.entry_id}, one_by_one=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(term.run)
            alarm = await agent.hears(Alarm)
            assert (alarm.kind, alarm.cause) == ("poison", poison.entry_id)
            assert (await agent.hears(StartEngine)).incarnation == 1
            assert await job.parked() == 1
            tasks.cancel_scope.cancel()


async def has_read_all(job: JobBus) -> bool:
    [last] = await job.tail(job.keys.facts, count=1)
    return (await job.snapshot()).cursor == last.entry_id


async def test_a_key_that_holds_something_else_costs_its_own_job_alone(server: Embedded) -> None:
    well, worse, worst = JobName("well"), JobName("worse"), JobName("worst")
    async with open_bus(server.url) as bus:
        raw = bus.reader()
        await raw.set(bus.job(worse).keys.pulse, "no hash")
        await raw.hset(bus.job(worst).keys.lease, "no", "string")
        async with orchestrating(server.url, jobs=[worst, worse, well], settings=Settings(lease_s=1.0)):
            for name in (well, worse):
                agent = Agent(bus.job(name))
                await agent.up(0, epoch=0)
                epoch = (await agent.serves()).epoch
                await renewed(raw, agent.job)
                await agent.say(EngineDead(engine=E0, incarnation=1, cause=Cause.EXIT))
                assert (await agent.hears(StopEngine)).epoch == epoch
            await raw.delete(bus.job(worst).keys.lease)
            await until(lambda: all_held(bus, [worst]))


async def test_facts_that_are_deleted_right_behind_a_trim_are_asked_for_again(
    server: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said next makes the stream again, as though nothing had ever stood in it."""
    monkeypatch.setattr(rounds, "TRIM_S", 0.0)
    async with open_bus(server.url) as bus:
        raw = bus.reader()
        async with orchestrating(server.url, settings=Settings(lease_s=1.0)):
            agent = Agent(bus.job(JOB))
            await agent.up(0, epoch=0)
            epoch = (await agent.serves()).epoch
            for _ in range(2):
                await renewed(raw, agent.job)
            await raw.delete(agent.job.keys.facts)
            await agent.up(1, epoch=epoch)
            await agent.hears(ReportRequested, above=epoch)


async def test_facts_that_were_trimmed_are_no_loss(server: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "TRIM_S", 0.0)
    async with open_bus(server.url) as bus:
        raw = bus.reader()
        async with orchestrating(server.url, settings=Settings(lease_s=1.0, keep_entries=1)):
            agent = Agent(bus.job(JOB))
            await agent.up(0, epoch=0)
            epoch = (await agent.serves()).epoch
            for _ in range(4):
                for _ in range(300):
                    await agent.up(1, epoch=epoch)
                await until(lambda: has_read_all(agent.job))
                await renewed(raw, agent.job)
            assert await raw.xlen(agent.job.keys.facts) < 600
            assert (await agent.job.snapshot()).epoch == epoch


# --- what is left behind ---------------------------------------------------------------------------


async def test_a_thousand_restarts_leave_nothing_behind(server: Embedded) -> None:
    async with open_bus(server.url) as bus:
        job, raw = bus.job(JOB), bus.reader()
        up = NodeUp(node=A, boot=BootId("b"))  # each term asks it for a report
        await job.append([Numbered(1, up, 0)], source=Source("agent/a"), boot=BootId("b"))
        async with orchestrating(server.url):
            await until(lambda: has_read_all(job))
        await restarts(server.url, RESTARTS // 10)
        found = [await what_is_there(bus, raw)]
        for _ in range(3):
            await restarts(server.url, 3 * RESTARTS // 10)
            found.append(await what_is_there(bus, raw))
        before, *_, after = found
        assert after.sizes == before.sizes
        assert (after.clients, after.descriptors, after.tasks) == (
            before.clients,
            before.descriptors,
            before.tasks,
        )
        # What else runs in this process may grow meanwhile, once; a leak grows in each round.
        assert min(later.objects - sooner.objects for sooner, later in pairwise(found)) < RESTARTS // 10
        assert await raw.xlen(job.keys.decisions) == RESTARTS
        keep = 100
        async with orchestrating(server.url, settings=Settings(keep_entries=keep)):
            await until(lambda: is_trimmed(job, keep))


async def restarts(url: str, times: int) -> None:
    """Orchestrators that take the job over and end, one after the other."""
    async with open_bus(url) as bus:
        job, reader = bus.job(JOB), bus.reader()
        last = (await job.snapshot()).tail
        for _ in range(times):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Orchestrator(bus, DEFAULT, jobs=(JOB,)).run)
                with anyio.fail_after(10.0):
                    while not (asked := await job.read_decisions(last, reader=reader, block_ms=1000)):
                        pass
                last = asked[-1].entry_id
                tasks.cancel_scope.cancel()


class Found(NamedTuple):
    """What is there of an orchestrator's, on the bus and in this process."""

    sizes: dict[str, int]
    """Of every key but the stream of decisions, which is trimmed after a while."""
    clients: int
    descriptors: int
    tasks: int
    objects: int


async def what_is_there(bus: Bus, raw: Any) -> Found:
    size = {"hash": raw.hlen, "set": raw.scard, "string": raw.strlen, "stream": raw.xlen}
    found = {key: await size[await raw.type(key)](key) for key in sorted(await raw.keys("relight:*"))}
    del found[bus.job(JOB).keys.decisions]
    gc.collect()
    return Found(
        found,
        len(await raw.client_list()),
        len(list(Path("/proc/self/fd").iterdir())),
        len(asyncio.all_tasks()),
        len(gc.get_objects()),
    )


async def is_trimmed(job: JobBus, keep: int) -> bool:
    """Trimming is by whole nodes of a stream, of 100 entries."""
    return len(await job.read_decisions(BEGINNING, count=10_000)) < keep + 100


async def test_sources_that_will_not_speak_again_are_forgotten_and_no_other(server: Embedded) -> None:
    async with open_bus(server.url) as bus, orchestrating(server.url):
        job, raw = bus.job(JOB), bus.reader()
        old, new, agent = Source("trainer/5"), Source("trainer/9"), Source("agent/a")
        for source, fact in (
            (old, boundary(5)),
            (new, boundary(9)),
            (agent, NodeUp(node=A, boot=BootId("b"))),
        ):
            await job.append([Numbered(1, fact, 0)], source=source, boot=BootId("b"))
            await job.pulse(source, Pulse(BootId("b"), 1))
        await until(lambda: has_read_all(job))
        async with orchestrating(server.url):  # which looks for them as it begins
            await until(lambda: forgotten(raw, job, old))
        assert set(await raw.hkeys(job.keys.seen)) == set(await raw.hkeys(job.keys.pulse)) == {new, agent}
        stale = await job.append([Numbered(2, boundary(5), 0)], source=old, boot=BootId("b"))
        assert stale == 1
        await until(lambda: has_read_all(job))
        assert (await job.snapshot()).meta.run == 9  # type: ignore[union-attr]


def boundary(run: int) -> SafeBoundary:
    return SafeBoundary(
        run=run, boundary=1, step=0, version=Version(run, 0), exports=Version(run, 0), state="open"
    )


async def forgotten(raw: Any, job: JobBus, source: Source) -> bool:
    return not await raw.hexists(job.keys.seen, source) and not await raw.hexists(job.keys.pulse, source)
