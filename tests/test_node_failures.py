"""Failures that others reported, each a small input with the right answer; docs/failures.md lists them."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from relight.agents.adapters.vllm import total
from relight.agents.node import marks, patience, ports, proc, start, stillbirth
from relight.agents.node.record import Member, Record, Store
from relight.events.bus.embedded import Embedded
from relight.events.decisions import SyncWeights
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    StartFailed,
    WeightsFailed,
)
from relight.events.ids import EngineName, SyncId
from relight.events.values import Member as Of
from relight.events.values import Process
from relight.events.version import BASE, Version
from tests.node_support import (
    E0,
    Player,
    alive,
    directing,
    engine,
    generating,
    kill,
    knobs,
    node_file,
    playing,
    post,
    record,
    role,
    running,
)

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(
    server: Embedded, tmp_path: Path, model: Path, *flags: str, **changes: Any
) -> AsyncIterator[tuple[Player, EngineStarted]]:
    """An engine that serves."""
    file = node_file(tmp_path / "state", engine(model, *flags, **changes))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        yield player, started


async def _get(started: EngineStarted, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as http, http.get(started.address + path) as response:
        return response.status, await response.read()


async def _waiting(started: EngineStarted) -> float:
    """Requests that wait in the engine."""
    told = total((await _get(started, "/metrics"))[1], "num_requests_waiting")
    assert told is not None
    return told


async def _nobody_dies(player: Player, within_s: float) -> None:
    with pytest.raises(TimeoutError):
        await player.wait(EngineDead, within_s=within_s)


# --- dead or hung but looks healthy, and the reverse -------------------------------------------------


async def test_a_frozen_core_with_calls_running_is_dead_once_though_its_server_answers_200(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    flags = ("--max-model-len", "100000", "--max-num-seqs", "1")
    async with serving(server, tmp_path, stub_model, *flags, stall_s=0.5) as (player, started):
        async with generating(started, tokens=50_000), generating(started, tokens=50_000):
            while await _waiting(started) != 1:
                await anyio.sleep(0.02)
            before = len(player.seen(Healthy))
            await knobs(started, freeze_after_tokens=0)
            dead = await player.wait(EngineDead)
            assert dead.cause == "stall"
            assert (await _get(started, "/health"))[0] == 200
            await _nobody_dies(player, 0.7)
        assert len(player.seen(Healthy)) == before


async def test_an_exit_with_code_0_that_was_asked_for_is_no_death(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model) as (player, started):
        stopped = await player.ask(EngineStopped, player.stop())
        assert set(started.processes) <= set(stopped.proof.processes)
        await _nobody_dies(player, 0.5)


async def test_late_probes_of_an_engine_that_makes_nothing_are_death(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model, stall_s=0.4) as (player, started):
        await knobs(started, probe_delay_s=25)
        dead = await player.wait(EngineDead)
        assert dead.cause == "stall" and "no progress" in dead.detail


async def test_each_known_state_has_a_deadline_of_its_own(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "CALL_S", 0.2)
    file = node_file(tmp_path / "state", engine(stub_model, "--probe-delay-s", "60", stall_s=0.2))
    async with directing(file, server.url) as player:
        await player.decide(player.start())
        while not (file.state_path / "engines/e0/record.json").exists() or record(file).port is None:
            await anyio.sleep(0.02)
        port = record(file).port
        while not ports.answers("127.0.0.1", port or 0):
            await anyio.sleep(0.02)
        await _nobody_dies(player, 1.0)  # initialising
        assert not player.seen(StartFailed)
        async with aiohttp.ClientSession() as http:
            await http.post(f"http://127.0.0.1:{port}/stub/knobs", json={"probe_delay_s": 0})
        started = await player.wait(EngineStarted)
        await knobs(started, probe_delay_s=60)
        await _nobody_dies(player, 1.0)  # paused
        order = SyncWeights(
            **player.head(),
            sync=SyncId("s1"),
            run=7,
            boundary=1,
            version=Version(7, 1),
            members=(Of(E0, 1, started.address),),
            deadline=player.deadline(30),
        )
        await player.decide(order)
        await _nobody_dies(player, 1.5)  # lent to a trainer
        await knobs(started, probe_delay_s=0)
        await player.ask(Healthy, player.verify(BASE))
        await knobs(started, probe_delay_s=60)
        assert (await player.wait(EngineDead)).cause == "stall"  # serving


async def test_an_open_port_without_an_answer_is_no_engine(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    body = (
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"
    )
    file = node_file(tmp_path / "state", engine(stub_model, command=(sys.executable, "-c", body, "{port}")))
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start(seconds=1.0))
        assert failed.cause == "deadline" and "it listens and is not well" in failed.detail
        assert not any(map(alive, failed.proof.processes))


async def test_a_server_that_stands_still_behind_its_open_port_is_dead(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = tmp_path / "state"
    async with serving(server, tmp_path, stub_model, stall_s=0.3) as (player, started):
        front = role(node_file(file, engine(stub_model)), "leader")
        os.kill(front.pid, signal.SIGSTOP)
        assert (await player.wait(EngineDead)).cause == "stall"
        stopped = await player.ask(EngineStopped, player.stop())
        assert set(started.processes) <= set(stopped.proof.processes)


async def test_a_server_that_answers_200_and_generates_nothing_is_a_failed_start(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--stream-fault", "silent"))
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start(seconds=3.0))
        assert failed.cause == "deadline" and "nothing was generated" in failed.detail
        assert failed.proof.processes and not any(map(alive, failed.proof.processes))


async def test_a_server_that_refuses_every_generation_is_never_healthy(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(
        tmp_path / "state", engine(stub_model, "--generate-status", "503"), engine(stub_model, name="e1")
    )
    other = EngineName("e1")
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start())
        assert failed.cause == "canary" and "503" in failed.detail
        started = await player.ask(EngineStarted, player.start(engine=other))
        await knobs(started, generate_status=503)
        refused = await player.ask(WeightsFailed, player.verify(BASE, engine=other))
        assert "503" in refused.error
        assert not player.seen(Healthy)
        assert (await _get(started, "/health"))[0] == 200


async def test_a_core_that_ends_at_its_wake_up_is_dead_though_the_call_said_200(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model) as (player, started):
        await knobs(started, dies_at_wake_up=True)
        await post(started, "/sleep?level=1")
        assert (await post(started, "/wake_up"))["status"] == "awake"
        dead = await player.wait(EngineDead, within_s=2)
        assert (dead.cause, dead.exit_code) == ("exit", 1)


async def test_canaries_of_a_busy_engine_never_pile_up_in_it(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    flags = ("--max-model-len", "100000", "--max-num-seqs", "1")
    async with (
        serving(server, tmp_path, stub_model, *flags) as (player, started),
        generating(started, tokens=50_000),
    ):
        for _ in range(3):
            busy = await player.ask(Healthy, player.probe(seconds=0.4))
            assert busy.canary is None and busy.evidence["canary"] is False
            assert await _waiting(started) <= 1
        look = player.probe(seconds=4.0)
        assert (await player.ask(Healthy, look)).canary is None
        assert player.job.bus.clock.now_ms() < look.deadline, "an answer that comes later is none"
        with anyio.fail_after(5):
            while await _waiting(started) > 0:
                await anyio.sleep(0.02)


async def test_a_line_in_the_log_is_evidence_and_never_a_verdict(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model, "--shm-line-s", "0.02", stall_s=0.3) as (
        player,
        started,
    ):
        await _nobody_dies(player, 1.5)
        assert (await player.ask(Healthy, player.probe())).address == started.address


async def test_a_replacement_that_stalls_after_its_canary_is_dead_again(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model, stall_s=0.4) as (player, _):
        kill(role(node_file(tmp_path / "state", engine(stub_model)), "core"))
        await player.wait(EngineDead)
        await player.ask(EngineStopped, player.stop())
        started = await player.ask(EngineStarted, player.start(2))
        await player.ask(Healthy, player.verify(BASE, 2))
        await knobs(started, freeze_after_tokens=100)
        async with generating(started, tokens=400):
            dead = await player.wait(EngineDead)
        assert (dead.incarnation, dead.cause) == (2, "stall")


async def test_an_engine_that_compiles_is_silent_and_not_dead(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model, stall_s=0.6) as (player, started):
        await knobs(started, compile_s=3.0)
        silent = await player.ask(Healthy, player.probe(seconds=1.0))
        assert silent.canary is None and silent.evidence["compiling"] is True
        assert (await player.ask(Healthy, player.probe())).canary is not None
        assert not player.seen(EngineDead)


# --- left-over, zombie and mistaken processes; signals -----------------------------------------------


async def test_a_start_first_proves_the_predecessors_orphans_gone(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model) as (player, started):
        kill(role(node_file(tmp_path / "state", engine(stub_model)), "leader"))
        await player.wait(EngineDead)
        again = await player.ask(EngineStarted, player.start(2))
        assert not any(map(alive, started.processes))
        assert all(map(alive, again.processes))


@contextmanager
def _recorded(state: Path, **changes: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A state directory whose engine runs, by its record, as a process that is somebody else's now."""
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    stat = proc.read_stat(bystander.pid)
    assert stat is not None
    taken = Process(bystander.pid, changes.pop("start", stat.start))
    store = Store(state)
    record = Record(
        engine=E0,
        incarnation=3,
        phase="up",
        tag="relight.gone.e0.3",
        tmpdir=str(state / "gone"),
        port=ports.pick(()),
        local="http://127.0.0.1:1",
        address="http://127.0.0.1:1",
        host_boot=changes.pop("host_boot", store.host_boot),
        leader=taken,
        members=(Member(taken, "leader"),),
    )
    store.save(record)
    store.close()
    try:
        yield bystander
    finally:
        bystander.kill()
        bystander.wait()


async def _taken_up(server: Embedded, tmp_path: Path, model: Path, detail: str) -> None:
    """The agent that finds the record tells a death, and proves the incarnation gone."""
    file = node_file(tmp_path / "state", engine(model))
    async with playing(server.url) as player, running(file, server.url):
        dead = await player.wait(EngineDead)
        assert dead.incarnation == 3 and detail in dead.detail
        stopped = await player.ask(EngineStopped, player.stop(3))
        assert stopped.proof.port_free


async def test_a_recorded_pid_that_another_process_has_now_is_never_signalled(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    with _recorded(tmp_path / "state", start=1) as bystander:
        await _taken_up(server, tmp_path, stub_model, "ended while no agent was watching")
        assert bystander.poll() is None


async def test_a_record_of_before_the_hosts_boot_names_nobody(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    with _recorded(tmp_path / "state", host_boot="another") as bystander:
        await _taken_up(server, tmp_path, stub_model, "ended while no agent was watching")
        assert bystander.poll() is None


def _wrapped(model: Path, tmp_path: Path, *knobs: str) -> tuple[Any, Path]:
    """An engine behind a shell that forwards no signal and counts the SIGTERMs that it gets."""
    told = tmp_path / "terms"
    plain = engine(model, *knobs)
    script = f"trap 'echo term >> {told}' TERM; \"$@\" & while ! wait $!; do :; done"
    return engine(model, command=("sh", "-c", script, "sh", *plain.command), grace_s=3.0), told


async def test_a_shell_that_forwards_no_signal_hides_nothing_from_the_stop(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    ours, told = _wrapped(stub_model, tmp_path)
    async with directing(node_file(tmp_path / "state", ours), server.url) as player:
        await player.ask(EngineStarted, player.start())
        stopped = await player.ask(EngineStopped, player.stop())
        assert stopped.proof.took_ms < 2500, "each process got its own SIGTERM"
        assert len(stopped.proof.processes) == 4 and not any(map(alive, stopped.proof.processes))
        assert told.read_text() == "term\n"


async def test_a_stop_that_is_asked_for_twice_sends_one_sigterm(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    ours, told = _wrapped(stub_model, tmp_path, "--ignore-sigterm")
    async with directing(node_file(tmp_path / "state", ours), server.url) as player:
        await player.ask(EngineStarted, player.start())
        await player.decide(player.stop())
        while not told.exists():
            await anyio.sleep(0.02)
        again = player.stop()
        stopped = await player.ask(EngineStopped, again)
        assert stopped.answers == again.id
        assert told.read_text() == "term\n"
        assert not any(map(alive, stopped.proof.processes))


async def test_an_engine_that_prints_a_flood_serves_on(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model, "--print-mib", "4") as (player, started):
        assert (await player.ask(Healthy, player.probe())).canary is not None
        lines = (tmp_path / "state/engines/e0/1/log").read_bytes()
        assert len(lines) > 4 << 20 and started.address


# --- restart: ports, memory, loops ------------------------------------------------------------------


async def test_engines_that_were_given_one_port_at_once_all_come_up(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [EngineName(f"e{index}") for index in range(3)]
    same, real = ports.pick(()), ports.pick
    given = iter([same] * len(names))
    monkeypatch.setattr(ports, "pick", lambda refused: next(given, None) or real(refused))
    file = node_file(tmp_path / "state", *(engine(stub_model, name=name) for name in names))
    async with directing(file, server.url) as player:
        await player.decide(*(player.start(engine=name) for name in names))
        started = [await player.wait(EngineStarted) for _ in names]
        assert len({each.address for each in started}) == len(names)
        assert not player.seen(StartFailed) and not player.seen(EngineDead)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (
            "Free memory on device (16.9/79.2 GiB) on startup is less than desired GPU memory utilization",
            "device-busy",
        ),
        ("[Errno 98] error while attempting to bind: address already in use", "EADDRINUSE"),
        ("KeyError: 'model.layers.0.mlp.experts.w2'", "exit"),
    ],
)
async def test_why_a_start_failed_is_told_apart(
    server: Embedded, tmp_path: Path, stub_model: Path, words: str, cause: str
) -> None:
    ours = engine(stub_model, "--start-fails", words, env={"CUDA_VISIBLE_DEVICES": "3"})
    file = node_file(tmp_path / "state", ours)
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start())
        assert (failed.cause, failed.retryable) == (cause, True)
        assert words in failed.detail
        assert failed.device == (None if cause == "EADDRINUSE" else "3")


async def test_a_start_that_the_kernel_kills_for_memory_is_the_nodes_trouble(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stillbirth, "SEARCH_S", 0.1)
    file = node_file(tmp_path / "state", engine(stub_model, "--slow-start-s", "60"))
    kills = 7
    monkeypatch.setattr(proc, "oom_kills", lambda: kills)
    async with directing(file, server.url) as player:
        await player.decide(player.start())
        slot = marks.slot_id(file.job, state_dir=file.state_path)
        while len(found := marks.family(slot, E0).get(1, [])) < 3:
            await anyio.sleep(0.05)
        await anyio.sleep(2 * stillbirth.SEARCH_S)  # the count was looked at
        kills += 1
        kill(found[-1])
        failed = await player.wait(StartFailed)
        assert failed.cause == "oom" and failed.retryable


async def test_a_slow_start_that_works_is_left_alone_and_one_that_stands_still_is_not(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LEAST_S", 0.2)
    monkeypatch.setattr(patience, "FACTOR", 0.1)
    monkeypatch.setattr(patience, "STILL_S", 0.5)
    spin = "import sys, time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\n"
    plain = engine(stub_model)
    script = '[ "$1" = 2 ] && "$2" -c "$3"; [ "$1" = 3 ] && exec sleep 60; shift 3; exec "$@"'
    command = ("sh", "-c", script, "sh", "{incarnation}", sys.executable, spin, *plain.command)
    file = node_file(tmp_path / "state", engine(stub_model, command=command, stall_s=0.2))
    async with directing(file, server.url) as player:
        good = await player.ask(EngineStarted, player.start())
        await player.ask(EngineStopped, player.stop())
        slow = await player.ask(EngineStarted, player.start(2))
        assert slow.seconds > good.seconds + 1.5
        await player.ask(EngineStopped, player.stop(2))
        failed = await player.ask(StartFailed, player.start(3, seconds=60))
        assert failed.cause == "stalled" and "its last good start took" in failed.detail
        assert not any(map(alive, failed.proof.processes))


# --- descriptors --------------------------------------------------------------------------------------


async def test_without_descriptors_an_engine_cannot_be_asked_and_is_not_dead(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with serving(server, tmp_path, stub_model, stall_s=0.3) as (player, _):
        hoard: list[socket.socket] = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 8, hard))
            try:
                while True:
                    hoard.append(socket.socket())
            except OSError as error:
                assert error.errno == 24
            await _nobody_dies(player, 2.0)
        finally:
            for held in hoard:
                held.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await player.ask(Healthy, player.probe())


def test_the_file_limit_is_raised_for_the_agent_and_its_engines() -> None:
    code = (
        "import resource; from relight.agents.node import launch;"
        "h = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, h)); launch.raise_file_limit();"
        "s, h = resource.getrlimit(resource.RLIMIT_NOFILE); print(s, h)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    soft, hard = map(int, told.split())
    assert soft == (hard if hard != resource.RLIM_INFINITY else 1 << 20) and soft > 128
