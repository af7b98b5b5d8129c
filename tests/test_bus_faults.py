"""What a fault of the bus does to a job that runs: nothing that lasts. One job goes through all of them."""

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import redis.asyncio as redis

from relight.agents.replay.client import ReplayClient
from relight.agents.replay.routes import Routes
from relight.events import codec
from relight.events.bus import outages
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import embedded
from relight.events.bus.job import JobBus
from relight.events.facts import EngineDead
from relight.events.keys import JOBS, ORCHESTRATORS
from relight.events.values import Phase
from tests.bus_rig import (
    ACL,
    E0,
    E1,
    JOB,
    OPTIONS,
    PASSWORD,
    SILENCE_S,
    START_S,
    USER,
    OneServer,
    warnings_of,
)
from tests.node_support import engine, kill, node_file, record, running, swept
from tests.orchestrator_support import orchestrating, until

pytestmark = pytest.mark.anyio

MOST_WARNINGS = 25
"""Of four connections to the bus in one process, each of which says what changes, once."""

KEYS = ("facts", "decisions", "state", "pulse", "seen", "lease", "epoch", "parked", ORCHESTRATORS)


@pytest.fixture(scope="module")
async def running_job(tmp_path_factory: pytest.TempPathFactory, stub_model: Path) -> AsyncIterator[OneServer]:
    job = OneServer(tmp_path_factory.mktemp("job"), stub_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outages, "SAID_MS", 300.0)  # one fault follows the other here
        async with job.works():
            yield job


@pytest.fixture
async def job(running_job: OneServer, caplog: pytest.LogCaptureFixture) -> AsyncIterator[OneServer]:
    """The one job, well before each fault; what is wrong is said on change and not at each try."""
    await running_job.until(running_job.is_well)
    caplog.clear()
    yield running_job
    said = warnings_of(caplog.get_records("call"))
    assert len(said) <= MOST_WARNINGS, said


@asynccontextmanager
async def fault(job: OneServer, name: str) -> AsyncIterator[None]:
    """The block ends when the bus serves again. Nothing of the job is touched, and clients went on."""
    before = {engine: job.processes(engine) for engine in (E0, E1)}
    turns, batches = job.turns, job.batches
    yield
    await job.until(lambda: job.turns > turns + 2 and job.batches > batches)
    await job.converges(fault=name)
    job.assert_untouched(before)
    await job.assert_no_wrong_word()


async def said(job: OneServer, caplog: pytest.LogCaptureFixture, text: str) -> None:
    """The fault has been noticed, and said for people."""
    await job.until(lambda: text in caplog.text)


async def outlast_silence(began: float) -> None:
    """An outage after which everybody would be judged silent if pulses alone were counted."""
    await anyio.sleep(max(0.0, began + SILENCE_S + 0.5 - time.monotonic()))


async def have_the_agent_speak(job: OneServer) -> None:
    """An agent whose connection was cut reports."""
    await job.raw.client_kill_filter(_type="normal", skipme=True)


# --- away --------------------------------------------------------------------------------------------


async def test_away_a_death_waits_and_is_told_once(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    well = job.processes(E0)
    incarnation, (leader, *_) = job.processes(E1)
    began = time.monotonic()
    job.kill_server()
    kill(leader)
    await said(job, caplog, "cannot be reached")
    turns, batches = job.turns, job.batches
    await job.until(lambda: job.turns > turns + 5 and job.batches > batches + 5)
    await outlast_silence(began)
    await job.start_server()
    await job.converges(fault="away, with a death", within_s=START_S)
    assert job.processes(E0) == well
    assert job.processes(E1)[0] == incarnation + 1
    told = [codec.decode_fact(entry) for entry in await job.facts() if entry.type == "EngineDead"]
    assert [(fact.engine, fact.incarnation) for fact in told if isinstance(fact, EngineDead)] == [
        (E1, incarnation)
    ]
    await job.assert_no_wrong_word()


@pytest.mark.long
async def test_away_for_a_minute(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    async with fault(job, "away for a minute"):
        job.kill_server()
        await said(job, caplog, "cannot be reached")
        await anyio.sleep(60.0)
        await job.start_server()


async def test_frozen(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    async with fault(job, "frozen (SIGSTOP)"):
        began = time.monotonic()
        os.kill(job.server.process.pid, signal.SIGSTOP)
        await said(job, caplog, "cannot be reached: Timeout")
        await outlast_silence(began)
        os.kill(job.server.process.pid, signal.SIGCONT)


async def test_paused(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    async with fault(job, "CLIENT PAUSE"):
        await job.raw.client_pause(60_000, all=False)
        await said(job, caplog, "cannot be reached: Timeout")
        await said(job, caplog, "could not be renewed")
        await job.raw.client_unpause()


async def test_connections_killed(job: OneServer) -> None:
    async with fault(job, "CLIENT KILL"):
        for _ in range(3):
            await job.raw.client_kill_filter(_type="normal", skipme=True)
            await anyio.sleep(0.1)


async def test_loading(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    pipe = job.raw.pipeline(transaction=False)
    for serial in range(4_000):  # it looks up from its file at every 1,024th command
        pipe.set(f"filler:{serial}", "y")
    await pipe.execute()
    async with fault(job, "LOADING"):
        job.kill_server()
        await job.start_server("--key-load-delay", "300")
        assert "it reads its data from disk" in caplog.text


# --- it refuses ----------------------------------------------------------------------------------------


async def test_full(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    async with fault(job, "OOM"):
        began = time.monotonic()
        await job.raw.config_set("maxmemory", 1)
        await said(job, caplog, "its memory is full")
        await said(job, caplog, "could not be renewed")
        await outlast_silence(began)
        await job.raw.config_set("maxmemory", 0)


async def test_made_a_replica_while_readers_are_blocked(
    job: OneServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with fault(job, "READONLY"):
        await job.raw.replicaof("127.0.0.1", 1)
        await said(job, caplog, "it is a replica")
        await job.raw.replicaof("NO", "ONE")


async def test_too_few_replicas(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    async with fault(job, "NOREPLICAS"):
        await job.raw.config_set("min-replicas-to-write", 1)
        await said(job, caplog, "min-replicas-to-write")
        await job.raw.config_set("min-replicas-to-write", 0)


async def test_its_disk_fails(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    in_the_way = job.server.directory / "dump.rdb"
    in_the_way.unlink(missing_ok=True)
    in_the_way.mkdir()
    async with fault(job, "MISCONF"):
        await job.raw.config_set("save", "3600 1")
        await job.raw.bgsave()
        await said(job, caplog, "it cannot write to its disk")
        in_the_way.rmdir()
        await job.raw.bgsave()
        await job.raw.config_set("save", "")


async def test_scripts_flushed(job: OneServer) -> None:
    async with fault(job, "NOSCRIPT"):
        for _ in range(200):
            await job.raw.script_flush()
            await anyio.sleep(0.002)


async def test_user_deleted(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    async with fault(job, "user deleted"):
        await job.raw.acl_deluser(USER)
        await said(job, caplog, "start this again with a URL that fits")
        assert PASSWORD not in caplog.text
        await job.raw.execute_command("ACL", "SETUSER", USER, *ACL)


async def test_password_changed(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    async with fault(job, "password changed"):
        await job.raw.execute_command("ACL", "SETUSER", USER, "resetpass", ">other")
        await job.raw.execute_command("CLIENT", "KILL", "USER", USER)
        await said(job, caplog, "start this again with a URL that fits")
        await job.raw.execute_command("ACL", "SETUSER", USER, "resetpass", f">{PASSWORD}")


async def test_credentials_rotated(
    tmp_path: Path, stub_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever speaks to the bus is started again with the new URL; the engine serves through all of it."""
    file = node_file(tmp_path / "node", engine(stub_model), job=JOB)
    with swept(file), embedded(tmp_path / "bus", options=OPTIONS) as server:
        old, new = (f"redis://{USER}:{password}@127.0.0.1:{server.port}" for password in (PASSWORD, "other"))
        async with open_bus(server.url) as bus:
            raw = bus.reader()
            async with orchestrating(old), running(file, old, stop_engines=False):
                epoch = await _routed(bus.job(JOB), above=0)
                before = record(file)
                await raw.execute_command("ACL", "SETUSER", USER, "resetpass", ">other")
                await raw.client_kill_filter(_type="normal", skipme=True)
                await until(lambda: caplog.text.count("start this again with a URL that fits") >= 2)
            async with orchestrating(new), running(file, new):
                await _routed(bus.job(JOB), above=epoch)
                async with ReplayClient(new, job=JOB) as client:
                    turn = await client.generate([5, 6, 7], {"max_tokens": 4})
                after = record(file)
                assert (after.incarnation, after.members) == (before.incarnation, before.members)
                assert (turn.attempts[0].incarnation, len(turn.token_ids)) == (after.incarnation, 4)
            await raw.aclose()


async def _routed(job: JobBus, *, above: int) -> int:
    """The epoch after `above` under which the engine is routed."""
    found: list[int] = []

    async def is_routed() -> bool:
        state = await job.snapshot()
        engine = state.engines.get(E0)
        found[:] = [state.epoch]
        nodes = state.meta.nodes.values() if state.meta is not None else ()
        reported = any(node.reported == state.epoch for node in nodes)
        return state.epoch > above and reported and engine is not None and engine.route is not None

    await until(is_routed, within_s=START_S)
    return found[0]


async def test_rights_taken(job: OneServer, caplog: pytest.LogCaptureFixture) -> None:
    async with fault(job, "NOPERM"):
        await job.raw.execute_command("ACL", "SETUSER", USER, "-@write")
        await said(job, caplog, "its ACL gives this user too little")
        await job.raw.execute_command("ACL", "SETUSER", USER, *ACL)


# --- what stands on it is another ------------------------------------------------------------------


async def test_emptied(job: OneServer) -> None:
    async with fault(job, "FLUSHALL"):
        await job.raw.flushall()
    await job.until(lambda: _is_enrolled(job))


async def _is_enrolled(job: OneServer) -> bool:
    return bool(await job.raw.sismember(JOBS, JOB))


async def test_facts_deleted_are_asked_for_again(job: OneServer) -> None:
    """Somebody trims by hand, or the server evicts: what was not read is lost, and nothing else shows it."""
    before = await job.state()
    assert before is not None

    async def is_new() -> bool:
        state = await job.state()
        return state is not None and state.epoch > before.epoch

    async with fault(job, "facts deleted"):
        await job.raw.delete(job.job.keys.facts)
        await job.until(is_new)
    after = await job.state()
    assert after is not None and after.birth == before.birth


@pytest.mark.parametrize("kind", KEYS)
async def test_a_key_of_another_type(job: OneServer, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    key = getattr(job.job.keys, kind, kind)
    async with fault(job, f"wrong type at {kind}"):
        await job.raw.delete(key, *([job.job.keys.lease] if kind == "epoch" else []))
        await (job.raw.set(key, "x") if kind not in ("lease", "epoch") else job.raw.rpush(key, "x"))
        if kind == "parked":
            await job.raw.xadd(job.job.keys.facts, {"type": "Nonsense"})
        if kind == "seen":
            await have_the_agent_speak(job)
        await said(job, caplog, "find it with TYPE and remove it with DEL")
        assert key in caplog.text
        await job.raw.delete(key)


@pytest.mark.parametrize("stream", ["facts", "decisions"])
async def test_poisoned(job: OneServer, caplog: pytest.LogCaptureFixture, stream: str) -> None:
    keys = job.job.keys
    async with fault(job, f"the last possible id in {stream}"):
        last = f"{2**64 - 1}-{2**64 - 1}"
        await job.raw.xadd(getattr(keys, stream), {"type": "Nonsense"}, id=last)
        if stream == "facts":
            await have_the_agent_speak(job)
        else:
            await job.raw.delete(keys.lease)  # a new epoch begins with decisions
        await said(job, caplog, "DEL both streams and the state of this job")
        await job.raw.delete(keys.facts, keys.decisions, keys.state)


async def test_an_id_near_the_last_one_does_no_harm(job: OneServer) -> None:
    keys = job.job.keys
    async with fault(job, "an entry id near the last one"):
        for stream in (keys.facts, keys.decisions):
            await job.raw.xadd(stream, {"type": "Nonsense"}, id=f"{2**64 - 1}-5")
    async with fault(job, "FLUSHALL"):
        await job.raw.flushall()


async def test_evicted(job: OneServer) -> None:
    keys = job.job.keys
    async with fault(job, "evicted"):
        info = await job.raw.info("memory")
        await job.raw.config_set("maxmemory-policy", "allkeys-lru")
        await job.raw.config_set("maxmemory", int(info["used_memory"]) + 500_000)
        serial = 0
        with anyio.fail_after(10):
            while await job.raw.exists(keys.facts, keys.decisions, keys.state):
                serial += 1
                await job.raw.set(f"filler:{serial}", "x" * 20_000)
        await job.raw.config_set("maxmemory", 0)
        await job.raw.config_set("maxmemory-policy", "noeviction")


async def test_rolled_back_by_a_fail_over_to_a_lagging_replica(job: OneServer, tmp_path: Path) -> None:
    options = (*OPTIONS, "--replicaof", "127.0.0.1", str(job.port))
    replica = await job.tidy.enter_async_context(embedded(tmp_path / "replica", options=options))
    async with redis.Redis.from_url(replica.url, decode_responses=True, protocol=2) as there:
        await job.until(lambda: _in_sync(job, there))
        await there.replicaof("NO", "ONE")  # the replication is cut here
        replaced, lost = job.processes(E1), job.processes(E0)
        kill(replaced[1][0])
        await job.until(lambda: job.processes(E1)[0] == replaced[0] + 1, within_s=START_S)
        await job.until(job.is_well, within_s=START_S)
        well = job.processes(E1)
        kill(lost[1][0])
        await job.until(lambda: _is_told_dead(job, lost[0]))
        job.kill_server()
        await there.config_set("port", job.port)
        job.server = replica
        seen: set[tuple[str, int]] = set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_look, job, seen)
            await job.converges(fault="rolled back, with deaths", within_s=START_S)
            tasks.cancel_scope.cancel()
        seen |= await _usable(job)  # the last look may have been before the end
        assert job.processes(E1) == well
        assert job.processes(E0)[0] == lost[0] + 1
        assert seen == {(E0, lost[0] + 1), (E1, well[0])}
        await job.assert_no_wrong_word()


async def _in_sync(job: OneServer, there: "redis.Redis") -> bool:
    ours, theirs = await job.raw.info("replication"), await there.info("replication")
    up = theirs.get("master_link_status") == "up"
    return bool(up and ours["master_repl_offset"] == theirs["slave_repl_offset"])


async def _is_told_dead(job: OneServer, incarnation: int) -> bool:
    state = await job.state()
    if state is None or state.engines[E0].incarnation != incarnation:
        return False
    return state.engines[E0].phase is not Phase.SERVING


async def _look(job: OneServer, seen: set[tuple[str, int]]) -> None:
    while True:
        seen |= await _usable(job)
        await anyio.sleep(0.005)


async def _usable(job: OneServer) -> set[tuple[str, int]]:
    """Every route that somebody who begins to read now would use."""
    state = await job.state()
    if state is None:
        return set()
    routes = Routes()
    routes.read(state, stamp=await job.bus.stamp())
    return {(route.key.engine, route.key.incarnation) for route in routes}
