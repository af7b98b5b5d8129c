"""Facts on their way to the bus: each one in the stream once and in order, whatever bus and disk do."""

import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest
import redis.asyncio as redis

from relight.agents.outbox import FileOutbox, MemoryOutbox, Outbox, Publisher
from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded, embedded
from relight.events.bus.job import JobBus
from relight.events.errors import Fenced
from relight.events.facts import Fact, NodeUp
from relight.events.ids import BEGINNING, BootId, JobName, NodeName, Source

AGENT = Source("agent/a")
JOB = JobName("job-1")
BOOT, OLDER = BootId("b2"), BootId("b1")
WITHIN_S = 15.0


def fact(number: int) -> Fact:
    return NodeUp(node=NodeName("a"), boot=BOOT, spares=number)


def numbers(facts: list[Fact]) -> list[int]:
    return [each.spares for each in facts if isinstance(each, NodeUp)]


def waiting(outbox: Outbox) -> list[int]:
    return numbers([each.fact for each in outbox.waiting(100_000)])


def seqs(outbox: Outbox) -> list[int]:
    return [each.seq for each in outbox.waiting(100_000)]


async def told(job: JobBus) -> list[int]:
    return numbers([codec.decode_fact(entry) for entry in await job.read_facts(BEGINNING, count=10_000)])


@contextmanager
def on_disk(directory: Path, *, capacity: int = 1_000) -> Iterator[FileOutbox]:
    """The outbox of one life of an agent."""
    outbox = FileOutbox(directory, collapse=lambda: fact(-1), source=AGENT, capacity=capacity)
    try:
        yield outbox
    finally:
        outbox.close()


@asynccontextmanager
async def publishing(job: JobBus, outbox: Outbox, *, boot: BootId = BOOT) -> AsyncIterator[Publisher]:
    publisher = Publisher(job, outbox, source=AGENT, boot=boot)

    async def run() -> None:
        await publisher.run(install=True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        yield publisher
        tasks.cancel_scope.cancel()


async def say(publisher: Publisher, *facts: int) -> None:
    """Say facts and wait until they are in the stream."""
    for number in facts:
        publisher.say(fact(number))
    with anyio.fail_after(WITHIN_S):
        await publisher.flushed()


@contextmanager
def full_disk(file: Path) -> Iterator[None]:
    """The kernel lets no file of this process grow beyond the size that `file` has now, and a bit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- the outbox on disk ------------------------------------------------------------------------------


def test_what_was_not_sent_is_there_in_the_next_life(tmp_path: Path) -> None:
    with on_disk(tmp_path) as outbox:
        for number in range(1, 6):
            outbox.put(fact(number))
        outbox.sent(2)
    with on_disk(tmp_path) as outbox:
        assert (waiting(outbox), seqs(outbox)) == ([3, 4, 5], [3, 4, 5])
        outbox.put(fact(6))
        assert seqs(outbox) == [3, 4, 5, 6]


SPOILT = [b"3 {\x00\xff}", b"", b"\x00" * 40, b'3 {"type":"Nonsense"}', b"x" * 9000]


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_line_that_cannot_be_read_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoilt: bytes
) -> None:
    with on_disk(tmp_path) as outbox:
        for number in range(1, 6):
            outbox.put(fact(number))
    log = tmp_path / "outbox.jsonl"
    lines = log.read_bytes().split(b"\n")
    lines[3] = spoilt  # behind the head, 1 and 2
    log.write_bytes(b"\n".join(lines))
    with on_disk(tmp_path) as outbox:
        assert (waiting(outbox), seqs(outbox)) == ([1, 2, 4, 5], [1, 2, 4, 5])
    assert caplog.text.count(f"a line of {log} cannot be read and is dropped") == 1
    caplog.clear()
    with on_disk(tmp_path) as outbox:  # and it is gone
        assert waiting(outbox) == [1, 2, 4, 5]
    assert not caplog.records


def test_half_a_last_line_is_a_fact_that_was_never_kept(tmp_path: Path) -> None:
    with on_disk(tmp_path) as outbox:
        outbox.put(fact(1))
        outbox.put(fact(2))
    log = tmp_path / "outbox.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    with on_disk(tmp_path) as outbox:
        assert waiting(outbox) == [1]
        outbox.put(fact(3))
    with on_disk(tmp_path) as outbox:
        assert waiting(outbox) == [1, 3]


def test_while_the_disk_is_full_facts_wait_in_memory_and_are_on_disk_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "outbox.jsonl"
    with on_disk(tmp_path) as outbox:
        outbox.put(fact(1))
        with full_disk(log):
            for number in (2, 3):
                outbox.put(fact(number))
            outbox.sent(1)
            assert waiting(outbox) == [2, 3]
        assert caplog.text.count("cannot be written, facts wait in memory") == 1
        assert not log.with_suffix(".new").exists()
        outbox.put(fact(4))
    with on_disk(tmp_path) as outbox:
        assert (waiting(outbox), seqs(outbox)) == ([2, 3, 4], [2, 3, 4])


def test_a_full_outbox_is_replaced_by_how_things_stand_on_disk_too(tmp_path: Path) -> None:
    with on_disk(tmp_path, capacity=10) as outbox:
        for number in range(1, 35):
            outbox.put(fact(number))
        kept = waiting(outbox)
        assert kept[0] == -1 and kept[1:] == list(range(32, 35)) and len(kept) <= 10
        assert (tmp_path / "outbox.jsonl").read_bytes().count(b"\n") <= 11
    with on_disk(tmp_path, capacity=10) as outbox:
        assert waiting(outbox) == kept


def test_numbers_that_the_bus_has_heard_of_are_never_given_again() -> None:
    outbox = MemoryOutbox()
    outbox.put(fact(1))
    outbox.put(fact(2))
    outbox.lift(2)
    assert seqs(outbox) == [1, 2]  # they may be in the stream already: their reply was lost
    outbox.lift(7)
    assert seqs(outbox) == [8, 9]
    outbox.put(fact(3))
    assert seqs(outbox) == [8, 9, 10]


# --- to the bus --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_facts_said_through_every_fault_arrive_once_and_in_order(
    server: Embedded, tmp_path: Path
) -> None:
    """Lost replies, cut connections, scripts that are gone, pauses and a server that is frozen and thawed."""
    last = 400
    async with open_bus(server.url) as bus, redis.Redis.from_url(server.url, protocol=2) as raw:
        job = bus.job(JOB)

        harms, thawed = 0, anyio.Event()

        async def harm() -> None:
            nonlocal harms
            while True:
                harms += 1
                await raw.script_flush()
                await raw.client_kill_filter(_type="normal", skipme=True)
                await raw.client_pause(40, all=False)
                await anyio.sleep(0.1)

        with on_disk(tmp_path) as outbox:
            async with publishing(job, outbox) as publisher, anyio.create_task_group() as tasks:
                tasks.start_soon(harm)
                for number in range(1, last + 1):
                    publisher.say(fact(number))
                    await anyio.sleep(0.002)
                    if number == last // 2:
                        tasks.start_soon(_freeze, server, thawed)
                with anyio.fail_after(WITHIN_S):
                    await thawed.wait()
                tasks.cancel_scope.cancel()
            async with publishing(job, outbox) as publisher:  # whatever is left
                with anyio.fail_after(WITHIN_S):
                    await publisher.flushed()
        assert await told(job) == list(range(1, last + 1))
        assert harms > 5


async def _freeze(server: Embedded, thawed: anyio.Event) -> None:
    """Longer than a command's time-out: what was sent meanwhile is done when nobody waits for it any more."""
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        await anyio.sleep(1.3)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        thawed.set()


@pytest.mark.anyio
async def test_an_outbox_that_was_lost_is_noticed_by_the_numbers_the_bus_has(
    server: Embedded, tmp_path: Path
) -> None:
    async with open_bus(server.url) as bus:
        job = bus.job(JOB)
        with on_disk(tmp_path) as outbox:
            async with publishing(job, outbox) as publisher:
                await say(publisher, 1, 2, 3)
        (tmp_path / "outbox.jsonl").unlink()
        with on_disk(tmp_path) as outbox:
            async with publishing(job, outbox) as publisher:
                await say(publisher, 4, 5)
        assert await told(job) == [1, 2, 3, 4, 5]


@pytest.mark.anyio
async def test_a_boot_whose_start_the_bus_lost_is_told_again_and_another_ones_is_not(
    server: Embedded, tmp_path: Path
) -> None:
    async with open_bus(server.url) as bus:
        job = bus.job(JOB)
        async with publishing(job, MemoryOutbox(), boot=OLDER) as older:
            await say(older, 1)
            async with publishing(job, MemoryOutbox()) as publisher:
                await say(publisher, 2)
                async with redis.Redis.from_url(server.url, protocol=2) as raw:
                    await raw.hset(job.keys.seen, AGENT, f"1:{OLDER}")  # as it stood on a lagging replica,
                    await raw.replicaof("127.0.0.1", 1)
                    await raw.replicaof("NO", "ONE")  # which is the primary now
                await say(publisher, 3)
            assert await told(job) == [1, 2, 3]
        with pytest.raises(ExceptionGroup) as stopped:
            async with publishing(job, MemoryOutbox()) as publisher:
                await say(publisher, 4)
                await job.append([], source=AGENT, boot=OLDER, install=True)  # it was started again
                await say(publisher, 5)
        assert stopped.group_contains(Fenced)
        assert await told(job) == [1, 2, 3, 4]


@pytest.mark.anyio
async def test_facts_outlive_an_agent_that_ends_while_the_bus_is_away(tmp_path: Path, free_port: int) -> None:
    url = f"redis://127.0.0.1:{free_port}"
    async with open_bus(url, reached=False) as bus:
        job = bus.job(JOB)
        with on_disk(tmp_path) as outbox:
            async with publishing(job, outbox) as publisher:
                for number in (1, 2, 3):
                    publisher.say(fact(number))
        async with embedded(tmp_path / "bus", port=free_port):
            with on_disk(tmp_path) as outbox:
                async with publishing(job, outbox) as publisher:
                    await say(publisher, 4)
            assert await told(job) == [1, 2, 3, 4]
