"""One contract for a job's part of the bus, held against every kind of server it may stand on."""

from collections.abc import AsyncIterator

import anyio
import msgspec
import pytest
import redis.asyncio as redis

from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.job import Commit, JobBus, Lease, Numbered, Pulse
from relight.events.decisions import Alarm, Decision
from relight.events.errors import Fenced, LostLease
from relight.events.facts import Fact, NodeUp, RestartRequested
from relight.events.ids import BEGINNING, BootId, DecisionId, EngineName, JobName, NodeName, Source
from relight.events.schema import EngineState, Meta

pytestmark = pytest.mark.anyio

AGENT = Source("agent/a")
ME = Source("orchestrator/me")
BOOT, OTHER = BootId("b1"), BootId("b2")


@pytest.fixture
async def bus(bus_url: str) -> AsyncIterator[Bus]:
    async with open_bus(bus_url) as opened:
        yield opened


@pytest.fixture
def job(bus: Bus) -> JobBus:
    return bus.job(JobName("job-1"))


@pytest.fixture
async def raw(bus_url: str) -> AsyncIterator["redis.Redis"]:
    """The server behind relight's back."""
    client = redis.Redis.from_url(bus_url, decode_responses=True, protocol=2)
    yield client
    await client.aclose()


def up(spares: int = 0) -> Fact:
    return NodeUp(node=NodeName("a"), boot=BOOT, spares=spares)


def numbered(*seqs: int) -> list[Numbered]:
    return [Numbered(seq, up(spares=seq), 1_000) for seq in seqs]


def alarm(serial: int, *, epoch: int) -> Decision:
    return Alarm(id=DecisionId(f"{epoch}-{serial}"), epoch=epoch, reason="why", kind="k", detail="d")


def commit(number: int, lease: Lease, *, decisions: int = 1, birth: str = "x", cursor: str = "5-0") -> Commit:
    return Commit(
        number=number,
        cursor=codec.EntryId(cursor),
        state=dict([codec.encode_meta(Meta(birth=birth))]),
        decisions=[alarm(number * 10 + n, epoch=lease.epoch) for n in range(decisions)],
    )


async def lease_of(job: JobBus, *, ttl_ms: int = 60_000) -> Lease:
    lease = await job.take_lease("me", ttl_ms=ttl_ms)
    assert lease is not None
    return lease


# --- append ----------------------------------------------------------------------------------------


async def test_a_fact_that_is_said_again_stands_once(job: JobBus) -> None:
    assert await job.append(numbered(1, 2), source=AGENT, boot=BOOT) == 2
    assert await job.append(numbered(1, 2), source=AGENT, boot=BOOT) == 0
    assert await job.append(numbered(2, 3), source=AGENT, boot=BOOT) == 1
    facts = [codec.decode_fact(entry) for entry in await job.read_facts(BEGINNING)]
    assert [fact.spares for fact in facts if isinstance(fact, NodeUp)] == [1, 2, 3]


async def test_numbers_of_other_sources_and_jobs_do_not_count(bus: Bus, job: JobBus) -> None:
    await job.append(numbered(5), source=AGENT, boot=BOOT)
    assert await job.append(numbered(1), source=Source("agent/b"), boot=BOOT) == 1
    assert await bus.job(JobName("job-2")).append(numbered(1), source=AGENT, boot=BOOT) == 1


async def test_another_boot_is_fenced_and_appends_nothing(job: JobBus) -> None:
    await job.append(numbered(1), source=AGENT, boot=BOOT)
    with pytest.raises(Fenced, match=r"agent/a of job job-1 now speaks as boot b1, not as b2"):
        await job.append(numbered(7), source=AGENT, boot=OTHER)
    assert len(await job.read_facts(BEGINNING)) == 1


async def test_a_start_installs_its_boot_and_fences_the_one_before(job: JobBus) -> None:
    await job.append(numbered(8), source=AGENT, boot=BOOT)
    assert await job.append(numbered(1), source=AGENT, boot=OTHER, install=True) == 1
    with pytest.raises(Fenced):
        await job.append(numbered(9), source=AGENT, boot=BOOT)
    assert await job.append(numbered(2), source=AGENT, boot=OTHER) == 1


async def test_installing_the_same_boot_again_keeps_its_numbers(job: JobBus) -> None:
    await job.append(numbered(4), source=AGENT, boot=BOOT, install=True)
    assert await job.append(numbered(4), source=AGENT, boot=BOOT, install=True) == 0


async def test_an_emptied_bus_takes_any_boot_as_the_first_one(job: JobBus, raw: "redis.Redis") -> None:
    await job.append(numbered(4), source=AGENT, boot=BOOT)
    await raw.flushall()
    assert await job.append(numbered(5), source=AGENT, boot=OTHER) == 1


async def test_a_large_batch_is_appended_whole(job: JobBus) -> None:
    assert await job.append(numbered(*range(1, 201)), source=AGENT, boot=BOOT) == 200
    assert len(await job.read_facts(BEGINNING)) == 200


async def test_a_wish_may_stand_twice(job: JobBus) -> None:
    wish = RestartRequested(engine=EngineName("e0"))
    first = await job.hint(wish, source=Source("operator/me"))
    assert await job.hint(wish, source=Source("operator/me")) != first


# --- commit ----------------------------------------------------------------------------------------


async def test_a_commit_writes_state_decisions_and_cursor_at_once(job: JobBus) -> None:
    lease = await lease_of(job)
    await job.commit(commit(1, lease, decisions=2), lease=lease, source=ME)
    state = await job.snapshot()
    first, second = await job.read_decisions(BEGINNING)
    assert (state.commit, state.epoch, state.cursor, state.birth) == (1, lease.epoch, "5-0", "x")
    assert (first.after, second.after, state.tail) == (BEGINNING, first.entry_id, second.entry_id)
    assert codec.decode_decision(first) == alarm(10, epoch=lease.epoch)


async def test_a_commit_whose_reply_was_lost_is_success_and_stands_once(job: JobBus) -> None:
    lease = await lease_of(job)
    for _ in range(2):
        await job.commit(commit(1, lease), lease=lease, source=ME)
    assert len(await job.read_decisions(BEGINNING)) == 1


@pytest.mark.parametrize("number", [3, 5])
async def test_a_commit_out_of_turn_changes_nothing(job: JobBus, number: int) -> None:
    lease = await lease_of(job)
    for turn in (1, 2, 3):
        await job.commit(commit(turn, lease), lease=lease, source=ME)
    before = await job.snapshot()
    if number == 3:  # the last one again: its reply was lost
        await job.commit(commit(number, lease, birth="y"), lease=lease, source=ME)
    else:
        with pytest.raises(LostLease, match=r"commit 5 of epoch \d+ was refused; the state is at commit 3"):
            await job.commit(commit(number, lease, birth="y"), lease=lease, source=ME)
    assert await job.snapshot() == before
    assert len(await job.read_decisions(BEGINNING)) == 3


async def test_without_the_lease_nothing_is_committed(job: JobBus) -> None:
    lease = await lease_of(job)
    await job.release_lease(lease)
    with pytest.raises(LostLease):
        await job.commit(commit(1, lease), lease=lease, source=ME)
    assert (await job.snapshot()).commit == 0
    assert await job.read_decisions(BEGINNING) == []


async def test_a_lost_epoch_commits_nothing_though_its_number_is_right(job: JobBus) -> None:
    old = await lease_of(job)
    await job.commit(commit(1, old), lease=old, source=ME)
    await job.release_lease(old)
    new = await job.take_lease("you", ttl_ms=60_000)
    assert new is not None and new.epoch > old.epoch
    with pytest.raises(LostLease):
        await job.commit(commit(2, old), lease=old, source=ME)
    await job.commit(commit(2, new), lease=new, source=Source("orchestrator/you"))
    assert (await job.snapshot()).epoch == new.epoch


async def test_a_lease_of_an_epoch_below_the_state_commits_nothing(job: JobBus, raw: "redis.Redis") -> None:
    lease = await lease_of(job)
    await raw.hset(job.keys.state, mapping={"epoch": str(lease.epoch + 1)})
    with pytest.raises(LostLease):
        await job.commit(commit(1, lease), lease=lease, source=ME)


async def test_trimming_keeps_what_is_unread_and_the_newest_decisions(job: JobBus) -> None:
    lease = await lease_of(job)
    for seq in range(1, 1000, 100):
        await job.append(numbered(*range(seq, seq + 100)), source=AGENT, boot=BOOT)
    facts = await job.read_facts(BEGINNING, count=2000)
    await job.commit(commit(1, lease, decisions=600, cursor=BEGINNING), lease=lease, source=ME)
    await job.trim(lease, keep=100)
    assert await job.read_facts(BEGINNING, count=2000) == facts  # none of them is committed
    tail = (await job.snapshot()).tail
    decisions = await job.read_decisions(BEGINNING, count=2000)
    assert 100 <= len(decisions) < 600 and decisions[-1].entry_id == tail
    await job.commit(commit(2, lease, decisions=0, cursor=facts[949].entry_id), lease=lease, source=ME)
    assert await job.trim(lease, keep=100) > 0
    assert await job.read_facts(facts[949].entry_id, count=2000) == facts[950:]
    assert await job.trim(Lease("you", lease.epoch), keep=1) == -1


async def test_a_commit_drops_what_is_no_more(job: JobBus) -> None:
    lease = await lease_of(job)
    kept, gone = (EngineName("e0"), EngineName("e1"))
    state = dict(codec.encode_engine(name, EngineState(node=NodeName("a"))) for name in (kept, gone))
    first = msgspec.structs.replace(commit(1, lease), state=commit(1, lease).state | state)
    await job.commit(first, lease=lease, source=ME)
    second = msgspec.structs.replace(commit(2, lease), dropped=[codec.engine_field(gone)])
    await job.commit(second, lease=lease, source=ME)
    assert list((await job.snapshot()).engines) == [kept]
    assert (await job.snapshot()).commit == 2


async def test_a_commit_without_decisions_keeps_the_tail(job: JobBus) -> None:
    lease = await lease_of(job)
    await job.commit(commit(1, lease), lease=lease, source=ME)
    tail = (await job.snapshot()).tail
    await job.commit(commit(2, lease, decisions=0, cursor="9-1"), lease=lease, source=ME)
    state = await job.snapshot()
    assert (state.tail, state.cursor, state.commit) == (tail, "9-1", 2)


async def test_scripts_are_loaded_again_when_the_server_forgot_them(job: JobBus, raw: "redis.Redis") -> None:
    lease = await lease_of(job)
    await job.commit(commit(1, lease), lease=lease, source=ME)
    await raw.script_flush()
    await job.commit(commit(2, lease), lease=lease, source=ME)
    assert await job.append(numbered(1), source=AGENT, boot=BOOT) == 1


# --- lease and counters ----------------------------------------------------------------------------


async def test_one_holder_at_a_time(job: JobBus) -> None:
    lease = await lease_of(job)
    assert await job.take_lease("you", ttl_ms=60_000) is None
    assert await job.take_lease("me", ttl_ms=60_000) is None
    assert await job.holder() == lease.value
    await job.release_lease(lease)
    assert await job.holder() is None


async def test_only_the_holder_renews_and_releases(job: JobBus, raw: "redis.Redis") -> None:
    lease = await lease_of(job, ttl_ms=50_000)
    stranger = Lease("you", lease.epoch + 1)
    assert not await job.renew_lease(stranger, ttl_ms=60_000)
    await job.release_lease(stranger)
    assert await job.renew_lease(lease, ttl_ms=60_000)
    assert 50_000 < await raw.pttl(job.keys.lease) <= 60_000


async def test_a_lease_that_is_not_renewed_expires_under_a_higher_epoch(job: JobBus) -> None:
    first = await lease_of(job, ttl_ms=20)
    with anyio.fail_after(5):
        while (second := await job.take_lease("you", ttl_ms=60_000)) is None:
            await anyio.sleep(0.005)  # an expired key wakes nobody
    assert second.epoch > first.epoch
    assert not await job.renew_lease(first, ttl_ms=60_000)


async def test_epochs_never_repeat_also_when_the_counter_is_lost(job: JobBus, raw: "redis.Redis") -> None:
    epochs: list[int] = []
    for turn in range(5):
        lease = await lease_of(job)
        epochs.append(lease.epoch)
        await job.release_lease(lease)
        if turn == 2:
            await raw.delete(job.keys.epoch)
            await anyio.sleep(0.002)  # epochs are at least the server's milliseconds
    assert epochs == sorted(set(epochs))


async def test_epochs_stand_above_the_state_and_the_floor(job: JobBus, raw: "redis.Redis") -> None:
    far = 9_000_000_000_000
    await raw.hset(job.keys.state, mapping={"epoch": str(far)})
    lease = await lease_of(job)
    assert lease.epoch == far + 1
    await job.release_lease(lease)
    higher = await job.take_lease("me", ttl_ms=1_000, floor=far + 50)
    assert higher is not None and higher.epoch == far + 51


async def test_runs_never_repeat_also_when_the_counter_is_lost(job: JobBus, raw: "redis.Redis") -> None:
    runs = [await job.issue_run() for _ in range(3)]
    assert runs == [runs[0], runs[0] + 1, runs[0] + 2]
    assert await job.issue_run(floor=runs[-1] + 100) == runs[-1] + 101
    await raw.delete(job.keys.run)
    lifted = await job.issue_run(floor=runs[-1] + 101)  # a report named it
    assert lifted == runs[-1] + 102


# --- reading, parking, pulses ----------------------------------------------------------------------


async def test_reading_goes_on_after_the_cursor(job: JobBus) -> None:
    await job.append(numbered(1, 2, 3), source=AGENT, boot=BOOT)
    first = await job.read_facts(BEGINNING, count=2)
    rest = await job.read_facts(first[-1].entry_id)
    assert [len(first), len(rest)] == [2, 1]
    assert await job.read_facts(rest[-1].entry_id) == []


async def test_a_blocked_reader_wakes_for_what_comes(bus: Bus, job: JobBus) -> None:
    reader = bus.reader()
    read: list[str] = []

    async def wait() -> None:
        read.extend(e.type for e in await job.read_facts(BEGINNING, reader=reader, block_ms=1_000))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await job.append(numbered(1), source=AGENT, boot=BOOT)
    assert read == ["NodeUp"]


async def test_a_blocked_reader_comes_back_empty_within_its_block(bus: Bus, job: JobBus) -> None:
    with anyio.fail_after(2):
        assert await job.read_facts(BEGINNING, reader=bus.reader(), block_ms=20) == []


async def test_blocking_on_the_command_client_is_refused(job: JobBus) -> None:
    with pytest.raises(ValueError, match="reader's client"):
        await job.read_facts(BEGINNING, block_ms=20)


async def test_what_nobody_can_decode_is_parked_with_the_reason(job: JobBus, raw: "redis.Redis") -> None:
    await raw.xadd(job.keys.facts, {"type": "Nonsense", "colour": "blue"})
    [entry] = await job.read_facts(BEGINNING)
    with pytest.raises(codec.Undecodable, match="unknown type 'Nonsense'") as error:
        codec.decode_fact(entry)
    await job.park(entry, str(error.value))
    [(_, parked)] = await raw.xrange(job.keys.parked)
    assert await job.parked() == 1
    assert parked["entry"] == entry.entry_id and "Nonsense" in parked["reason"]


async def test_what_is_no_text_is_read_and_parked_like_any_other(job: JobBus, raw: "redis.Redis") -> None:
    await raw.execute_command("XADD", job.keys.facts, "*", b"type", b"\xff\xfe", b"data", b"\xff")
    await job.hint(RestartRequested(engine=EngineName("e0")), source=Source("operator/me"))
    spoilt, wish = await job.read_facts(BEGINNING)
    with pytest.raises(codec.Undecodable, match="unknown type") as error:
        codec.decode_fact(spoilt)
    await job.park(spoilt, str(error.value))
    assert await job.parked() == 1
    assert codec.decode_fact(wish) == RestartRequested(engine=EngineName("e0"))


async def test_pulses_are_overwritten_and_removed(job: JobBus, raw: "redis.Redis") -> None:
    await job.pulse(AGENT, Pulse(BOOT, 1))
    await job.pulse(AGENT, Pulse(BOOT, 2))
    await raw.hset(job.keys.pulse, "agent/broken", "{")
    assert await job.pulses() == {AGENT: Pulse(BOOT, 2)}
    await job.still(AGENT)
    assert await job.pulses() == {}


async def test_jobs_enrol_once_and_keep_to_their_own_keys(bus: Bus, raw: "redis.Redis") -> None:
    for name in ("b", "a", "b"):
        await bus.enrol(JobName(name))
    assert await bus.jobs() == ["a", "b"]
    for name in ("a", "b"):
        job = bus.job(JobName(name))
        await job.commit(commit(1, lease := await lease_of(job)), lease=lease, source=ME)
        await job.append(numbered(1), source=AGENT, boot=BOOT)
        await job.pulse(AGENT, Pulse(BOOT, 1))
        await job.issue_run()
    keys = set(await raw.keys("*")) - {"relight:jobs"}
    assert {key.split(":")[1] for key in keys} == {"{a}", "{b}"}


async def test_what_is_no_jobs_name_is_passed_over(bus: Bus, raw: "redis.Redis") -> None:
    await raw.sadd("relight:jobs", "Not A Job", "")
    await bus.enrol(JobName("a"))
    assert await bus.jobs() == ["a"]


async def test_bus_time_is_the_servers(bus: Bus, raw: "redis.Redis") -> None:
    before = await bus.tell_time()
    seconds, micros = await raw.time()
    after = await bus.tell_time()
    assert before <= seconds * 1000 + micros // 1000 <= after
    assert abs(bus.clock.now_ms() - after) < 1_000
