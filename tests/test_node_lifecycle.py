"""One engine under a real agent: start, proof, death, stop, each with real processes."""

import os
import socket
import sys
from pathlib import Path

import anyio
import pytest

from relight.agents.node import marks, ports, proc
from relight.agents.node.proc import Liveness
from relight.events.bus.embedded import Embedded
from relight.events.errors import BusUnavailable, UsageError
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    NodeUp,
    StartFailed,
)
from relight.events.version import BASE
from tests.node_support import (
    E0,
    JOB,
    agent,
    directing,
    engine,
    kill,
    knobs,
    node_file,
    record,
    role,
)

pytestmark = pytest.mark.anyio


async def test_an_engine_is_started_proven_killed_and_stopped(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        up = player.seen(NodeUp)[0]
        assert [(e.engine, e.incarnation, e.state) for e in up.engines] == [("e0", 0, "absent")]
        started = await player.ask(EngineStarted, player.start())
        assert started.weights is None
        assert len(started.processes) == 3
        healthy = await player.ask(Healthy, player.verify(BASE))
        assert healthy.canary is not None and len(healthy.canary.logprobs) == 16
        assert healthy.canary.checksums is not None

        kill(role(file, "core"))
        dead = await player.wait(EngineDead)
        assert (dead.cause, dead.signal, dead.exit_code) == ("signal", 9, None)
        assert dead.detect_ms is not None and dead.detect_ms < 100
        before = record(file)
        stopped = await player.ask(EngineStopped, player.stop())
        assert set(started.processes) <= set(stopped.proof.processes)
        assert all(proc.liveness(each) is Liveness.DEAD for each in stopped.proof.processes)
        assert stopped.proof.port_free
        assert not Path(before.tmpdir).exists()
        assert before.segments
        assert not any(Path(segment.path).exists() for segment in before.segments)

        again = await player.ask(EngineStarted, player.start(2))
        assert again.address != started.address
    assert len(player.seen(EngineDead)) == 1


@pytest.mark.parametrize("victim", ["leader", "core", "worker"])
async def test_the_death_of_each_vital_process_is_told_once_and_its_orphans_are_stopped(
    server: Embedded, tmp_path: Path, stub_model: Path, victim: str
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        await player.ask(EngineStarted, player.start())
        kill(role(file, victim))
        dead = await player.wait(EngineDead)
        assert (dead.cause, dead.signal) == ("signal", 9)
        stopped = await player.ask(EngineStopped, player.stop())
        assert all(proc.liveness(each) is Liveness.DEAD for each in stopped.proof.processes)
    assert len(player.seen(EngineDead)) == 1


async def test_an_exit_with_code_0_that_nobody_asked_for_is_death(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        await knobs(started, exit_after_tokens=0)
        dead = await player.wait(EngineDead)
        assert (dead.cause, dead.exit_code) == ("exit", 0)


async def test_a_repeated_command_is_answered_with_its_fact_and_changes_nothing(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        first = await player.ask(EngineStarted, player.start())
        second = await player.ask(EngineStarted, player.start())
        assert second.processes == first.processes
        await player.decide(player.stop(7), player.start(0), player.probe(3))
        stopped = await player.ask(EngineStopped, player.stop(7))
        assert stopped.proof.processes == ()
        assert all(proc.liveness(each) is Liveness.ALIVE for each in first.processes)
        proof = (await player.ask(EngineStopped, player.stop())).proof
        assert (await player.ask(EngineStopped, player.stop())).proof == proof


async def test_a_start_that_fails_is_cleared_and_says_why(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--start-fails", "no memory on device 3"))
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start())
        assert "no memory on device 3" in failed.detail
        assert failed.proof.port_free and failed.proof.processes
        assert not Path(record(file).tmpdir).exists()
        assert (await player.ask(EngineStopped, player.stop())).proof == failed.proof


async def test_a_front_that_exits_in_start_up_leaves_nothing(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--front-exits-in-start"))
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start())
        assert all(proc.liveness(each) is Liveness.DEAD for each in failed.proof.processes)


async def test_a_start_past_its_deadline_is_killed(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--slow-start-s", "60", "--ignore-sigterm"))
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start(seconds=1.0))
        assert failed.cause == "deadline"
        assert failed.proof.processes
        assert all(proc.liveness(each) is Liveness.DEAD for each in failed.proof.processes)


async def test_a_stop_interrupts_a_start_and_kills_at_once(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--slow-start-s", "60", "--ignore-sigterm"))
    async with directing(file, server.url) as player:
        order = player.start()
        await player.decide(order)
        while not (file.state_path / "engines/e0/record.json").exists() or record(file).leader is None:
            await anyio.sleep(0.02)
        stopped = await player.ask(EngineStopped, player.stop(), within_s=3)
        assert stopped.proof.took_ms < 1000
    assert not player.seen(EngineStarted) and not player.seen(StartFailed)


async def test_an_engine_that_ignores_sigterm_is_killed_after_its_grace(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--ignore-sigterm", grace_s=0.3))
    async with directing(file, server.url) as player:
        await player.ask(EngineStarted, player.start())
        stopped = await player.ask(EngineStopped, player.stop())
        assert 300 <= stopped.proof.took_ms < 2000


async def test_daemonised_children_and_port_holders_are_found_and_killed(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--strays", "2", "--hold-port", grace_s=0.2))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        assert len(started.processes) >= 6
        kill(role(file, "leader"))
        await player.wait(EngineDead)
        stopped = await player.ask(EngineStopped, player.stop())
        assert stopped.proof.port_free
        assert len(stopped.proof.processes) >= 6


async def test_a_literal_port_stays_and_a_foreign_holder_is_named(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    port = ports.pick(())
    file = node_file(tmp_path / "state", engine(stub_model, port=port))
    async with directing(file, server.url) as player:
        with socket.create_server(("127.0.0.1", port)):  # takes it also while old connections rest on it
            failed = await player.ask(StartFailed, player.start())
            assert failed.cause == "EADDRINUSE" and failed.retryable
            assert str(os.getpid()) in failed.detail
        for incarnation in (2, 3):
            started = await player.ask(EngineStarted, player.start(incarnation))
            assert started.address == f"http://127.0.0.1:{port}"
            await player.ask(EngineStopped, player.stop(incarnation))


async def test_a_port_that_was_taken_in_between_is_tried_again_elsewhere(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = ports.pick(())
    real, given = ports.pick, iter([taken])
    monkeypatch.setattr(ports, "pick", lambda refused: next(given, None) or real(refused))
    file = node_file(tmp_path / "state", engine(stub_model))
    with socket.create_server(("127.0.0.1", taken)):
        async with directing(file, server.url) as player:
            started = await player.ask(EngineStarted, player.start())
            assert started.address != f"http://127.0.0.1:{taken}"


async def test_nobody_else_gets_a_signal(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    import subprocess

    file = node_file(tmp_path / "state", engine(stub_model), engine(stub_model, name="e1"))
    bystanders = [
        subprocess.Popen(["sleep", "60"]),
        subprocess.Popen(["sleep", "60"], start_new_session=True),
    ]
    try:
        async with directing(file, server.url) as player:
            other = await player.ask(EngineStarted, player.start(engine="e1"))  # type: ignore[arg-type]
            for incarnation in range(1, 4):
                await player.ask(EngineStarted, player.start(incarnation))
                kill(role(file, ["core", "leader", "worker"][incarnation - 1]))
                await player.wait(EngineDead)
                await player.ask(EngineStopped, player.stop(incarnation))
            assert all(proc.liveness(each) is Liveness.ALIVE for each in other.processes)
            assert all(process.poll() is None for process in bystanders)
    finally:
        for process in bystanders:
            process.kill()
            process.wait()


async def test_a_held_state_directory_and_an_unreachable_bus_are_refused(
    server: Embedded, tmp_path: Path, stub_model: Path, free_port: int
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with pytest.raises(BusUnavailable):
        await agent.serve(file, bus_url=f"redis://127.0.0.1:{free_port}")
    async with directing(file, server.url):
        with pytest.raises(UsageError, match="held by another"):
            await agent.serve(file, bus_url=server.url)


async def test_a_drained_engine_says_so_and_running_requests_are_waited_for(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    import aiohttp

    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 150}, "stream": False}
        async with aiohttp.ClientSession() as http, anyio.create_task_group() as tasks:
            answers: list[int] = []

            async def call() -> None:
                async with http.post(started.address + "/inference/v1/generate", json=body) as answer:
                    answers.append(len((await answer.json())["choices"][0]["token_ids"]))

            tasks.start_soon(call)
            await anyio.sleep(0.05)
            await player.ask(EngineStopped, player.stop(drain_s=10.0, then="drained"))
        assert answers == [150]
        await player.decide()
        up = await player.ask(NodeUp, _report(player))
        assert [(e.state, e.incarnation) for e in up.engines] == [("drained", 1)]


def _report(player):  # type: ignore[no-untyped-def]
    from relight.events.decisions import ReportRequested

    return ReportRequested(**player.head(), node="node-a", deadline=player.deadline())


async def test_a_lower_epoch_is_answered_with_node_up(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    import msgspec

    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        await player.ask(EngineStarted, player.start())
        old = msgspec.structs.replace(player.stop(), epoch=player.lease.epoch - 1)
        await player.decide(old)
        up = await player.wait(NodeUp)
        while up.engines[0].state != "paused":
            up = await player.wait(NodeUp)
        assert up.max_epoch == player.lease.epoch
        assert all(proc.liveness(member.process) is Liveness.ALIVE for member in record(file, E0).members)


async def test_what_a_start_makes_until_it_is_killed_is_removed_with_it(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """Shared memory that is mapped between a last look and the kill has no owner to be told by."""
    slot = marks.slot_id(JOB, state_dir=tmp_path / "state")
    body = (  # each is mapped before it gets its name: no moment in which it is neither mapped nor absent
        "import itertools, mmap, os, time\n"
        "kept, root = [], os.open('/', os.O_RDONLY)\n"
        "for number in itertools.count():\n"
        "    fd = os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR, 0o600)\n"
        "    os.truncate(fd, 4096)\n"
        "    kept.append(mmap.mmap(fd, 4096))\n"
        f"    os.link(f'/proc/self/fd/{{fd}}', f'/dev/shm/psm_relight.{slot}.{{number}}', src_dir_fd=root)\n"
        "    time.sleep(0.001)\n"
    )
    maker = engine(stub_model, command=(sys.executable, "-c", body, "{port}"), start_s=0.7)
    file = node_file(tmp_path / "state", maker)
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start())
        assert failed.cause == "deadline"
        assert len(record(file).segments) > 20
        left = {str(path) for path in Path("/dev/shm").glob(f"psm_relight.{slot}.*")}
        assert not left
