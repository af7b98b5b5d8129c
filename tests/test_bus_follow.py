"""Following decisions and reading both streams as one, through gaps, emptied buses and outages."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis.asyncio as redis

from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.embedded import Embedded, embedded
from relight.events.bus.follow import Away, Decided, Follower, Noted, Quiet, Synced
from relight.events.bus.job import Commit, JobBus, Lease, Numbered
from relight.events.bus.journal import Journal, merged
from relight.events.decisions import Alarm, Decision, SyncWeights
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable
from relight.events.facts import Fact, Healthy, NodeSilent, NodeUp, WeightsPublished
from relight.events.ids import BootId, DecisionId, EngineName, EntryId, JobName, NodeName, Source, SyncId
from relight.events.schema import Meta
from relight.events.version import BASE

pytestmark = pytest.mark.anyio

AGENT = Source("agent/a")
BOOT = BootId("b1")
Event = Synced | Decided | Noted | Away | Quiet


@pytest.fixture
async def bus(bus_url: str) -> AsyncIterator[Bus]:
    async with open_bus(bus_url) as opened:
        yield opened


@pytest.fixture
def job(bus: Bus) -> JobBus:
    return bus.job(JobName("job-1"))


class Orchestrator:
    """Commits one decision at a time."""

    def __init__(self, job: JobBus, lease: Lease, *, birth: str) -> None:
        self.job, self.lease, self.birth = job, lease, birth
        self.number = 0

    async def decide(self, what: str | Fact) -> None:
        self.number += 1
        decision: Decision | Fact = (
            Alarm(
                id=DecisionId(f"{self.lease.epoch}-{self.number}"),
                epoch=self.lease.epoch,
                reason="why",
                kind=what,
                detail="",
            )
            if isinstance(what, str)
            else what
        )
        state = dict([codec.encode_meta(Meta(birth=self.birth))])
        commit = Commit(number=self.number, cursor=EntryId("0-0"), state=state, decisions=[decision])
        await self.job.commit(commit, lease=self.lease, source=Source("orchestrator/me"))


async def orchestrator(job: JobBus, *, birth: str = "x") -> Orchestrator:
    lease = await job.take_lease("me", ttl_ms=60_000)
    assert lease is not None
    return Orchestrator(job, lease, birth=birth)


async def until(follower: Follower, kind: type[Event]) -> Event:
    """The next event of `kind`."""
    with anyio.fail_after(20):
        while not isinstance(event := await follower.next(), kind):
            pass
    return event


def kinds(events: list[Event]) -> list[str]:
    return [
        e.decision.kind if isinstance(e, Decided) and isinstance(e.decision, Alarm) else type(e).__name__
        for e in events
    ]


async def test_it_starts_with_the_state_and_goes_on_behind_its_tail(job: JobBus) -> None:
    ours = await orchestrator(job)
    await ours.decide("old")
    follower = Follower(job)
    first = await follower.next()
    await ours.decide("new")
    await ours.decide("newer")
    assert isinstance(first, Synced) and (first.why, first.snapshot.commit) == ("start", 1)
    assert kinds([await follower.next(), await follower.next()]) == ["new", "newer"]


async def test_the_very_first_decision_is_not_missed(job: JobBus) -> None:
    follower = Follower(job)
    assert kinds([await follower.next()]) == ["Synced"]
    ours = await orchestrator(job)
    await ours.decide("first")
    assert kinds([await follower.next()]) == ["first"]


async def test_facts_and_unknown_types_among_decisions_are_noted(job: JobBus) -> None:
    ours = await orchestrator(job)
    follower = Follower(job)
    await follower.next()
    await ours.decide(NodeSilent(node=NodeName("a"), since=5))
    await ours.decide("after it")
    assert kinds([await follower.next(), await follower.next()]) == ["Noted", "after it"]


async def test_a_trimmed_gap_is_noticed_and_answered_with_the_state(job: JobBus, bus_url: str) -> None:
    ours = await orchestrator(job)
    follower = Follower(job)
    await follower.next()
    for what in ("1", "2", "3"):
        await ours.decide(what)
    async with redis.Redis.from_url(bus_url, protocol=2) as raw:
        await raw.xtrim(job.keys.decisions, maxlen=1, approximate=False)
    event = await follower.next()
    assert isinstance(event, Synced) and (event.why, event.snapshot.commit) == ("gap", 3)
    await ours.decide("4")
    assert kinds([await follower.next()]) == ["4"]


async def test_an_emptied_bus_is_noticed_without_any_entry(server: Embedded) -> None:
    async with open_bus(server.url) as bus, redis.Redis.from_url(server.url, protocol=2) as raw:
        job = bus.job(JobName("job-1"))
        await (await orchestrator(job)).decide("old")
        follower = Follower(job)
        await follower.next()
        await raw.flushall()
        gone = await until(follower, Synced)
        assert isinstance(gone, Synced) and (gone.why, gone.snapshot.birth) == ("reborn", None)
        await (await orchestrator(job, birth="y")).decide("new")
        assert kinds([await until(follower, Decided)]) == ["new"]


async def test_a_state_born_anew_is_noticed_although_its_ids_go_on(server: Embedded) -> None:
    async with open_bus(server.url) as bus, redis.Redis.from_url(server.url, protocol=2) as raw:
        job = bus.job(JobName("job-1"))
        await (await orchestrator(job)).decide("old")
        follower = Follower(job)
        await follower.next()
        await raw.flushall()
        await (await orchestrator(job, birth="y")).decide("new")
        event = await until(follower, Synced)
        assert isinstance(event, Synced) and event.snapshot.birth == "y" and event.why in ("gap", "reborn")


async def test_an_outage_is_told_once_and_ends_with_the_state(tmp_path: Path, free_port: int) -> None:
    directory = tmp_path / "bus"
    async with open_bus(f"redis://127.0.0.1:{free_port}", reached=False) as bus:
        job = bus.job(JobName("job-1"))
        follower = Follower(job)
        async with embedded(directory, port=free_port):
            ours = await orchestrator(job)
            await ours.decide("before")
            await until(follower, Synced)
        away = await until(follower, Away)
        assert isinstance(away, Away) and str(free_port) in away.reason
        assert kinds([await follower.next()]) == ["Quiet"]
        async with embedded(directory, port=free_port):
            back = await until(follower, Synced)
            assert isinstance(back, Synced)
            assert (back.why, back.snapshot.commit) == ("reborn", 1)  # the server has another run id
            await ours.decide("after")
            assert kinds([await until(follower, Decided)]) == ["after"]


async def test_a_server_that_was_never_there_is_one_sentence(free_port: int) -> None:
    with pytest.raises(BusUnavailable, match=rf"bus redis://127\.0\.0\.1:{free_port} cannot be reached"):
        async with open_bus(f"redis://127.0.0.1:{free_port}"):
            pass


async def test_passwords_do_not_stand_in_messages(free_port: int) -> None:
    with pytest.raises(BusUnavailable) as error:
        async with open_bus(f"redis://me:hunter2@127.0.0.1:{free_port}"):
            pass
    assert "hunter2" not in str(error.value) and "me:***@" in str(error.value)


# --- both streams as one ---------------------------------------------------------------------------


def up(seq: int) -> Numbered:
    return Numbered(seq, NodeUp(node=NodeName("a"), boot=BOOT, spares=seq), 1_000)


async def test_a_journal_tells_both_streams_in_order(job: JobBus) -> None:
    ours = await orchestrator(job)
    journal = Journal(job)
    for turn in range(1, 6):
        await job.append([up(turn)], source=AGENT, boot=BOOT)
        await anyio.sleep(0.002)  # within one millisecond the streams' ids say nothing of each other
        await ours.decide(str(turn))
        await anyio.sleep(0.002)
    assert [entry.type for entry in await journal.next()] == ["NodeUp", "Alarm"] * 5
    assert [entry.type for entry in await Journal(job).tail(count=3)] == ["Alarm", "NodeUp", "Alarm"]


async def test_a_journal_waits_for_what_comes_and_repeats_nothing(job: JobBus) -> None:
    journal = Journal(job)
    await job.append([up(1)], source=AGENT, boot=BOOT)
    assert len(await journal.tail(count=10)) == 1
    told: list[Entry] = []

    async def wait() -> None:
        while not told:
            told.extend(await journal.next())

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await job.append([up(2)], source=AGENT, boot=BOOT)
    assert len(told) == 1


async def test_a_long_stream_holds_the_other_one_back(job: JobBus) -> None:
    ours = await orchestrator(job)
    journal = Journal(job)
    for turn in range(12):
        await job.append([up(turn * 100 + n) for n in range(1, 101)], source=AGENT, boot=BOOT)
        await ours.decide(str(turn))
        await anyio.sleep(0.002)
    told: list[Entry] = []
    while batch := await journal.next():
        told.extend(batch)
    places = [place for place, entry in enumerate(told) if entry.type == "Alarm"]
    assert len(told) == 1_212
    assert places == [100 * (turn + 1) + turn for turn in range(12)]


async def test_one_millisecond_that_fills_a_reading_is_told_whole(
    job: JobBus, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relight.events.bus.journal.BATCH", 2)
    fields = codec.encode(up(1).fact, source=AGENT, time_ms=1)
    async with redis.Redis.from_url(bus_url, protocol=2) as raw:
        for serial in range(9):
            await raw.xadd(job.keys.facts, dict(fields), id=f"5-{serial + 1}")
        await raw.xadd(job.keys.decisions, {"type": "Alarm", "after": "0-0"}, id="5-1")
    journal = Journal(job)
    told = [entry.entry_id for _ in range(3) for entry in await journal.next()]
    assert told == [*(f"5-{serial + 1}" for serial in range(9)), "5-1"]


def entry(entry_id: str, fact: Fact | Decision) -> Entry:
    return codec.entry(entry_id, codec.encode(fact, source=AGENT, time_ms=1))


def test_within_one_millisecond_an_answer_stands_behind_what_it_answers() -> None:
    order = Alarm(id=DecisionId("7-1"), epoch=7, reason="", kind="k", detail="")
    cause = entry("5-0", NodeUp(node=NodeName("a"), boot=BOOT))
    answer = entry(
        "5-1",
        Healthy(engine=EngineName("e"), incarnation=1, address="a", version=BASE, answers=DecisionId("7-1")),
    )
    decided = entry("5-0", order)
    assert merged([cause, answer], [decided]) == [cause, decided, answer]
    assert merged([cause], [decided]) == [cause, decided]


def test_within_one_millisecond_published_weights_stand_behind_their_sync() -> None:
    order: dict[str, Any] = {"run": 7, "boundary": 1, "version": BASE, "members": (), "deadline": 1}
    sync = SyncWeights(id=DecisionId("7-1"), epoch=7, reason="", sync=SyncId("s1"), **order)
    published = WeightsPublished(sync=SyncId("s1"), version=BASE, uri="/s", digest="d")
    decided, fact = entry("5-0", sync), entry("5-0", published)
    assert merged([fact], [decided]) == [decided, fact]
