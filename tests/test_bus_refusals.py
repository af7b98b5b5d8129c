"""What a bus that does not serve looks like: one kind of error with a sentence that helps, said once."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
import redis.asyncio as redis

from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.embedded import Embedded, embedded
from relight.events.bus.errors import shown
from relight.events.bus.follow import Away, Follower, Synced
from relight.events.bus.job import Commit, Numbered, Pulse
from relight.events.bus.outages import Outages
from relight.events.decisions import Alarm
from relight.events.errors import BusUnavailable, UsageError
from relight.events.facts import NodeUp
from relight.events.ids import BEGINNING, BootId, DecisionId, JobName, NodeName, Source
from relight.events.schema import Meta
from relight.orchestrator.cli.main import main
from tests.bus_rig import ACL

AGENT = Source("agent/a")
BOOT = BootId("b1")
JOB = JobName("job-1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    with embedded(tmp_path_factory.mktemp("bus")) as running:
        yield running


@pytest.fixture
async def raw(shared: Embedded) -> AsyncIterator["redis.Redis"]:
    """The server behind relight's back, emptied."""
    async with redis.Redis.from_url(shared.url, decode_responses=True, protocol=2) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def bus(shared: Embedded, raw: "redis.Redis") -> AsyncIterator[Bus]:
    async with open_bus(shared.url) as opened:
        yield opened


# --- at a start ------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random"])
async def test_a_server_that_may_evict_is_refused_with_what_to_set(
    shared: Embedded, raw: "redis.Redis", policy: str
) -> None:
    await raw.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(UsageError, match=rf"{policy}.*CONFIG SET maxmemory-policy noeviction"):
            async with open_bus(shared.url):
                pass
    finally:
        await raw.config_set("maxmemory-policy", "noeviction")


@pytest.mark.anyio
async def test_a_server_that_begins_to_evict_is_told_once(
    bus: Bus, raw: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    await raw.config_set("maxmemory-policy", "allkeys-lru")
    try:
        for _ in range(3):
            await bus.stamp()
    finally:
        await raw.config_set("maxmemory-policy", "noeviction")
    assert caplog.text.count("CONFIG SET maxmemory-policy noeviction") == 1


def test_orchestrators_and_agents_exit_with_2_and_those_who_only_look_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with embedded(tmp_path / "bus", options=("--maxmemory-policy", "allkeys-lru")) as server:
        for words in (["orchestrate"], ["agent", "--job", "grpo-1", "--", "true", "{port}"]):
            cut = words.index("--") if "--" in words else len(words)
            assert main([*words[:cut], "--bus", server.url, *words[cut:]]) == 2
            assert "CONFIG SET maxmemory-policy noeviction" in capsys.readouterr().err
        assert main(["status", "--bus", server.url]) == 2
        assert "has no job" in capsys.readouterr().err


@pytest.mark.anyio
async def test_what_is_no_bus_at_all_is_one_sentence() -> None:
    with (
        _web_server() as port,
        pytest.raises(BusUnavailable, match=r"refuses: Protocol error, got \"H\""),
    ):
        async with open_bus(f"redis://127.0.0.1:{port}"):
            pass


@contextmanager
def _web_server() -> Iterator[int]:
    """Answers whatever comes as HTTP does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_one_shot_commands_name_the_key_that_holds_something_else(
    server: Embedded, capsys: pytest.CaptureFixture[str]
) -> None:
    async def spoil() -> None:
        async with open_bus(server.url) as bus, redis.Redis.from_url(server.url, protocol=2) as raw:
            await bus.enrol(JOB)
            await raw.set(bus.job(JOB).keys.state, "x")
            await raw.set(bus.job(JOB).keys.facts, "x")

    anyio.run(spoil)
    for words, key in ((["status"], "state"), (["events"], "facts")):
        assert main([*words, "--bus", server.url]) == 2
        said = capsys.readouterr().err
        assert said.startswith("relight: bus ") and said.count("\n") == 1
        assert f"relight:{{{JOB}}}:{key}" in said and "remove it with DEL" in said


@pytest.mark.anyio
async def test_the_rights_of_one_job_suffice_for_it_and_for_no_other(
    shared: Embedded, raw: "redis.Redis"
) -> None:
    keys = (f"~relight:{{{JOB}}}:*", "~relight:jobs")
    await raw.execute_command("ACL", "SETUSER", "one", *("on", ">hunter2"), *keys, *ACL[3:])
    async with open_bus(shared.url.replace("//", "//one:hunter2@")) as bus:
        job = bus.job(JOB)
        await bus.enrol(JOB)
        assert await bus.jobs() == [JOB]
        assert isinstance(await Follower(job).next(), Synced)
        lease = await job.take_lease("me", ttl_ms=60_000)
        assert lease is not None and await job.issue_run() > 0
        await job.append([_up()], source=AGENT, boot=BOOT, install=True)
        await job.pulse(AGENT, Pulse(BOOT, 1))
        commit = Commit(number=1, cursor=BEGINNING, state={}, decisions=[])
        await job.commit(commit, lease=lease, source=Source("orchestrator/me"))
        assert await job.trim(lease, keep=10) == 0 and len(await job.read_facts(BEGINNING)) == 1
        await job.release_lease(lease)
        with pytest.raises(BusUnavailable, match="its ACL gives this user too little") as refused:
            await bus.job(JobName("job-2")).append([_up()], source=AGENT, boot=BOOT)
    assert refused.value.kind == "rights"


# --- refused while it runs -------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_commit_that_is_refused_halfway_has_changed_nothing(bus: Bus, raw: "redis.Redis") -> None:
    """The server undoes nothing of a script: what can be refused comes first in it."""
    job = bus.job(JOB)
    lease = await job.take_lease("me", ttl_ms=60_000)
    assert lease is not None
    await raw.xadd(job.keys.decisions, {"type": "Nonsense"}, id=f"{2**64 - 1}-{2**64 - 1}")
    state = dict([codec.encode_meta(Meta(birth="x"))])
    alarm = Alarm(id=DecisionId("1-1"), epoch=lease.epoch, reason="", kind="k", detail="d")
    commit = Commit(number=1, cursor=BEGINNING, state=state, decisions=[alarm])
    with pytest.raises(BusUnavailable, match="DEL both streams and the state of this job") as refused:
        await job.commit(commit, lease=lease, source=Source("orchestrator/me"))
    assert refused.value.kind == "exhausted" and job.keys.decisions in str(refused.value)
    assert await raw.exists(job.keys.state) == 0
    await raw.delete(job.keys.decisions)
    await job.commit(commit, lease=lease, source=Source("orchestrator/me"))
    assert (await job.snapshot()).commit == 1


@pytest.mark.anyio
async def test_who_cannot_write_loses_the_lease(bus: Bus, raw: "redis.Redis") -> None:
    """Pulses that cannot be written would else be taken for silence by one who can still read them."""
    job = bus.job(JOB)
    lease = await job.take_lease("me", ttl_ms=60_000)
    assert lease is not None and await job.renew_lease(lease, ttl_ms=60_000)
    await raw.config_set("maxmemory", 1)
    try:
        calls = {
            "renew": lambda: job.renew_lease(lease, ttl_ms=60_000),
            "pulse": lambda: job.pulse(AGENT, Pulse(BOOT, 1)),
            "append": lambda: job.append([_up()], source=AGENT, boot=BOOT),
        }
        for call in calls.values():
            with pytest.raises(BusUnavailable, match="its memory is full") as refused:
                await call()
            assert refused.value.kind == "full"
        assert await job.holder() == lease.value  # reading goes on
    finally:
        await raw.config_set("maxmemory", 0)


def _up() -> Numbered:
    return Numbered(1, NodeUp(node=NodeName("a"), boot=BOOT), 1_000)


@pytest.mark.anyio
async def test_a_follower_tells_again_when_the_trouble_is_another(tmp_path: Path, free_port: int) -> None:
    url = f"redis://me:hunter2@127.0.0.1:{free_port}"
    options = ("--user", "me", "on", ">hunter2", "~*", "+@all")
    async with open_bus(url, reached=False) as bus:
        follower = Follower(bus.job(JOB))
        async with embedded(tmp_path / "bus", port=free_port, options=options):
            assert isinstance(await follower.next(), Synced)
        reasons = [await _away(follower)]
        async with embedded(tmp_path / "bus", port=free_port):
            reasons.append(await _away(follower))
        async with embedded(tmp_path / "bus", port=free_port, options=options):
            with anyio.fail_after(10):
                while not isinstance(await follower.next(), Synced):
                    pass
    assert "cannot be reached" in reasons[0]
    assert "invalid username-password" in reasons[-1] and "hunter2" not in reasons[-1]


async def _away(follower: Follower) -> str:
    with anyio.fail_after(10):
        while not isinstance(event := await follower.next(), Away):
            pass
    return event.reason


@pytest.mark.anyio
async def test_a_state_that_ends_before_what_was_read_is_read_again(bus: Bus, raw: "redis.Redis") -> None:
    """Rolled back on a server that says nothing of itself: its ids may be issued again, and stay unread."""
    job = bus.job(JOB)
    lease = await job.take_lease("me", ttl_ms=60_000)
    assert lease is not None
    state = dict([codec.encode_meta(Meta(birth="x"))])
    for number in (1, 2):
        alarm = Alarm(id=DecisionId(f"1-{number}"), epoch=lease.epoch, reason="", kind="k", detail="d")
        commit = Commit(number=number, cursor=BEGINNING, state=state, decisions=[alarm])
        await job.commit(commit, lease=lease, source=Source("orchestrator/me"))
    first, _ = await job.read_decisions(BEGINNING)
    follower = Follower(job)
    assert isinstance(await follower.next(), Synced)
    await raw.hset(job.keys.state, mapping={"commit": "1", "tail": first.entry_id})
    with anyio.fail_after(10):
        while not isinstance(event := await follower.next(), Synced):
            pass
    assert event.snapshot.tail == first.entry_id


# --- said once -------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def away(kind: str = "unreachable", text: str = "gone") -> BusUnavailable:
    return BusUnavailable(text, kind=kind)


def test_an_outage_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "relight.events.bus")
    outages = Outages()
    for number in range(50):
        outages.failed(f"call {number}", away(text=f"gone {number}"))
    outages.served("another call")
    outages.served("call 7")
    assert lines(caplog) == ["the bus does not serve: gone 0", "the bus serves again"]


def test_what_is_refused_is_over_when_each_refused_call_is_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "relight.events.bus")
    outages = Outages()
    outages.failed("append", away("full", "no room"))
    outages.failed("commit", away("full", "no room"))
    outages.served("read")
    outages.served("append")
    assert lines(caplog) == ["the bus does not serve: no room"]
    outages.served("commit")
    assert lines(caplog)[1:] == ["the bus serves again"]


def test_each_trouble_is_said_and_one_that_comes_and_goes_is_not(caplog: pytest.LogCaptureFixture) -> None:
    outages = Outages()
    outages.failed("append", away("full", "no room"))
    outages.failed("pulse", away("foreign", "a key"))
    for _ in range(20):
        outages.failed("read", away())
        outages.served("read")
    assert lines(caplog) == [f"the bus does not serve: {text}" for text in ("no room", "a key", "gone")]


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("redis://me:hunter2@h:1/0", "redis://me:***@h:1/0"),
        ("redis://:hunter2@h", "redis://:***@h"),
        ("redis://me:hun@ter2@h", "redis://me:***@h"),
        ("redis://me:hun/ter2#@h", "redis://me:***@h"),
        ("redis://h:1?password=hunter2", "redis://h:1?password=***"),
        (
            "redis+sentinel://me:hunter2@a:1,b/s/0?sentinel_username=x&sentinel_password=hunter2",
            "redis+sentinel://me:***@a:1,b/s/0?sentinel_username=x&sentinel_password=***",
        ),
        ("unix://me:hunter2@/run/bus.sock", "unix://me:***@/run/bus.sock"),
        ("redis://h:1", "redis://h:1"),
    ],
)
def test_no_password_is_shown(url: str, without: str) -> None:
    assert shown(url) == without
