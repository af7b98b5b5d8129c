"""Whatever becomes of the process that holds a job: another one takes over, and it decides no more."""

import contextlib
import signal
from pathlib import Path

import pytest

from relight.events import keys
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.bus.job import JobBus
from relight.events.decisions import ReportRequested, StopEngine
from relight.events.envelope import Entry
from relight.events.facts import EngineDead
from relight.events.ids import BEGINNING
from relight.events.values import Cause
from tests.orchestrator_support import E0, JOB, Agent, Orchestrator, processes, until
from tests.slow_link import link_to

pytestmark = pytest.mark.anyio


async def in_a_row(job: JobBus) -> list[Entry]:
    """Every decision; each follows the one before it, and no epoch comes back after a higher one."""
    entries = await job.read_decisions(BEGINNING, count=10_000)
    assert [entry.after for entry in entries[1:]] == [entry.entry_id for entry in entries[:-1]]
    epochs = [int(str(entry.id).partition("-")[0]) for entry in entries if entry.id]
    assert epochs == sorted(epochs)
    return entries


async def holder_of(job: JobBus, *among: Orchestrator) -> Orchestrator:
    """Which of the processes holds the job."""
    found: list[Orchestrator] = []

    async def held() -> bool:
        lease = await job.holder()
        found[:] = [one for one in among if one.holds(lease)]
        return bool(found)

    await until(held)
    return found[0]


async def another_than(last: Orchestrator, job: JobBus, agent: Agent, *, above: int) -> int:
    """Another process has taken over, and asks what is true; its epoch."""
    asked = await agent.hears(ReportRequested, above=above)
    lease = await job.holder()
    assert lease is not None and lease.startswith(f"{asked.epoch}:") and not last.holds(lease)
    return asked.epoch


async def test_a_holder_that_is_killed_or_frozen_is_followed_by_another(
    server: Embedded, tmp_path: Path
) -> None:
    async with (
        open_bus(server.url) as bus,
        processes(tmp_path, server.url, server.url) as (one, other),
    ):
        await bus.enrol(JOB)
        job = bus.job(JOB)
        agent = Agent(job)
        frozen = await holder_of(job, one, other)
        await agent.up(0, epoch=0)
        epoch = (await agent.serves()).epoch

        frozen.send(signal.SIGSTOP)
        after_freeze = await another_than(frozen, job, agent, above=epoch)
        await agent.up(1, epoch=after_freeze, condition="up")
        frozen.send(signal.SIGCONT)
        await until(lambda: b"term ended" in frozen.log.read_bytes())
        await agent.say(EngineDead(engine=E0, incarnation=1, cause=Cause.EXIT))
        assert (await agent.hears(StopEngine)).epoch == after_freeze
        assert frozen.is_running()

        killed = other if frozen is one else one
        killed.kill()
        assert await another_than(killed, job, agent, above=after_freeze) > after_freeze
        assert frozen.holds(await job.holder())
        stops = [entry for entry in await in_a_row(job) if entry.type == "StopEngine"]
        assert {str(entry.id).partition("-")[0] for entry in stops} == {str(after_freeze)}


async def test_what_a_cut_off_holder_had_decided_is_refused_when_it_arrives(
    server: Embedded, tmp_path: Path
) -> None:
    async with (
        open_bus(server.url) as bus,
        link_to(server.port) as link,
        contextlib.AsyncExitStack() as stack,
    ):
        await bus.enrol(JOB)
        job = bus.job(JOB)
        agent = Agent(job)
        behind = f"redis://127.0.0.1:{link.port}"
        [holder] = await stack.enter_async_context(processes(tmp_path / "", behind))
        await holder_of(job, holder)
        await agent.up(0, epoch=0)
        epoch = (await agent.serves()).epoch
        (tmp_path / "standby").mkdir()
        await stack.enter_async_context(processes(tmp_path / "standby", server.url))
        raw = bus.reader()

        async def holder_listens() -> bool:
            return int((await raw.info("clients"))["blocked_clients"]) == 1

        await until(holder_listens)
        link.cut_to_server()
        await agent.say(EngineDead(engine=E0, incarnation=1, cause=Cause.EXIT))
        await until(lambda: b"StopEngine" in link.held)  # it was heard, and the commit is on its way
        later = await another_than(holder, job, agent, above=epoch)
        await agent.up(1, epoch=later, condition="up")
        assert (await agent.hears(StopEngine)).epoch == later
        late = b"StopEngine" in link.held and str(epoch).encode() in link.held
        link.join()
        await until(lambda: b"the bus serves again" in holder.log.read_bytes())

        assert late
        stops = [entry for entry in await in_a_row(job) if entry.type == "StopEngine"]
        assert {str(entry.id).partition("-")[0] for entry in stops} == {str(later)}
        assert b"term ended" in holder.log.read_bytes()
        assert holder.is_running()


async def test_a_holder_that_ends_gives_its_job_up_at_once(server: Embedded, tmp_path: Path) -> None:
    file = tmp_path / "orchestrator.toml"
    file.write_text("[defaults]\nlease_s = 600.0\n")  # nobody lives to see it run out
    options = ("--config", str(file))
    async with (
        open_bus(server.url) as bus,
        processes(tmp_path, server.url, server.url, options=options) as (one, other),
    ):
        await bus.enrol(JOB)
        job = bus.job(JOB)
        agent = Agent(job)
        ending = await holder_of(job, one, other)
        await agent.up(0, epoch=0)
        epoch = (await agent.serves()).epoch
        ending.send(signal.SIGTERM)
        assert await another_than(ending, job, agent, above=epoch) > epoch
        assert ending.wait() == 0
        told = await bus.reader().hkeys(keys.ORCHESTRATORS)
        assert [f"-{one.pid}-" in name or f"-{other.pid}-" in name for name in told] == [True]
