"""Signals to the agent as a service manager sends them, and the operator's look at an engine that hangs."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from relight.agents.node import evidence, proc
from relight.agents.node.config import NodeFile
from relight.events import codec
from relight.events.bus.embedded import Embedded
from relight.events.decisions import Decision
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    NodeUp,
    StartFailed,
    WeightsFailed,
)
from relight.events.version import BASE, Version
from tests.node_support import (
    alive,
    directing,
    engine,
    knobs,
    node_file,
    playing,
    record,
    role,
    swept,
    write_snapshot,
)

pytestmark = pytest.mark.anyio
WITHIN_S = 20.0


@contextmanager
def command(file: NodeFile, url: str, folder: Path, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`relight agent` on this node file."""
    config = folder / "node.toml"
    [only] = file.engines
    config.write_text(
        f'job = "{file.job}"\nnode = "{file.node}"\nstate_dir = "{file.state_dir}"\n[[engines]]\n'
        f'name = "{only.name}"\ngrace_s = {only.grace_s}\n'
        f"command = {codec.to_json(list(only.command))}\n"
    )
    words = ["agent", "--bus", url, "--config", str(config), *flags]
    process = subprocess.Popen([sys.executable, "-m", "relight.orchestrator.cli", *words])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_second_sigterm_hurries_the_stop_of_the_engines_and_leaves_none(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--ignore-sigterm", grace_s=60.0))
    with swept(file):
        async with playing(server.url) as player:
            with command(file, server.url, tmp_path, "--stop-engines") as agent:
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start())
                await player.ask(Healthy, player.verify(BASE))
                agent.send_signal(signal.SIGTERM)
                with anyio.fail_after(WITHIN_S):
                    while record(file).phase != "stopping":
                        await anyio.sleep(0.02)
                assert all(map(alive, started.processes)), "it ignores SIGTERM and has its grace"
                agent.send_signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(agent.wait, WITHIN_S) == 0
            assert not any(map(alive, started.processes))
            stopped = await player.wait(EngineStopped)
            assert set(started.processes) <= set(stopped.proof.processes)
            assert not player.seen(EngineDead)


async def test_a_terminated_agent_leaves_its_engines_serving(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            with command(file, server.url, tmp_path) as agent:
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start())
                agent.send_signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(agent.wait, WITHIN_S) == 0
            assert all(map(alive, started.processes))
            with command(file, server.url, tmp_path, "--stop-engines") as agent:
                up = await player.wait(NodeUp)
                assert up.engines[0].state == "paused"
                agent.send_signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(agent.wait, WITHIN_S) == 0
            assert not any(map(alive, started.processes))


async def test_a_hung_engine_is_looked_at_before_it_is_killed_and_the_look_is_bounded(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "SECONDS", 0.7)
    monkeypatch.setattr(evidence, "LIMIT_BYTES", 4000)
    script = 'echo shell $$; cat /proc/$0/stat; env; sleep 61 & while :; do echo "$1"; sleep 0.001; done'
    looks = ("sh", "-c", script, "{pid}", "all {pids}")
    file = node_file(tmp_path / "state", engine(stub_model, stall_s=0.4, evidence=looks))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        core = role(file, "core")
        await knobs(started, freeze_after_tokens=0)
        assert (await player.wait(EngineDead)).cause == "stall"
        stopped = await player.ask(EngineStopped, player.stop())
        assert set(stopped.proof.processes) == set(started.processes), "the look is no part of the engine"
        kept = (file.state_path / "engines/e0/1/evidence").read_text()
        first, stat, *rest = kept.splitlines()[1:]
        assert first.startswith("shell ") and stat.startswith(f"{core.pid} (") and ") T " in stat
        assert "RELIGHT_TAG" not in kept and "VLLM_PROCESS_NAME_PREFIX" not in kept
        assert f"all {','.join(str(each.pid) for each in started.processes)}" in kept
        assert "killed after 0.7 s" in rest[-1] and len(kept) < 5000
        left = [stat for stat in proc.all_stats().values() if proc.command_line(stat.pid) == "sleep 61"]
        assert not left


async def test_an_engine_that_has_ended_is_not_looked_at(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, evidence=("sh", "-c", "echo looked")))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await knobs(started, exit_after_tokens=0)
        await player.wait(EngineDead)
        await player.ask(EngineStopped, player.stop())
        assert not (file.state_path / "engines/e0/1/evidence").exists()
    assert msgspec.structs.asdict(file.engines[0])["evidence"]


LOOKS = ("sh", "-c", 'cat /proc/$0/stat; echo "all $1"', "{pid}", "{pids}")


def _looks(file: NodeFile) -> list[str]:
    """What was seen of the first incarnation, a line each."""
    path = file.state_path / "engines/e0/1/evidence"
    return [line for line in path.read_text().splitlines() if line[0] not in "$["] if path.exists() else []


async def test_a_start_that_stands_still_is_looked_at_before_it_is_killed(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--slow-start-s", "60", evidence=LOOKS))
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, player.start(seconds=2))
        assert failed.cause == "deadline"
        stat, pids = _looks(file)
        gone = {str(process.pid) for process in failed.proof.processes}
        assert stat.split()[0] in gone and set(pids.removeprefix("all ").split(",")) <= gone


@pytest.mark.parametrize("step", ["load", "proof"])
async def test_a_load_or_a_proof_that_hangs_until_its_deadline_is_looked_at_before_the_kill(
    server: Embedded, tmp_path: Path, stub_model: Path, step: str
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", Version(7, 1), seed=1)
    file = node_file(tmp_path / "state", engine(stub_model, evidence=LOOKS))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        core = role(file, "core")
        if step == "load":
            await knobs(started, reload="hang")
            order: Decision = player.load(Version(7, 1), uri, digest, seconds=2)
        else:
            await knobs(started, freeze_after_tokens=0)
            order = player.verify(BASE, seconds=2)
        assert (await player.ask(WeightsFailed, order)).touched
        await player.ask(EngineStopped, player.stop())
        stat, pids = _looks(file)
        assert stat.startswith(f"{core.pid} (")
        assert pids == f"all {','.join(str(each.pid) for each in started.processes)}"
        assert not player.seen(EngineDead)


@pytest.mark.parametrize("late", [True, False])
async def test_a_stop_at_the_deadline_of_what_it_interrupts_finds_a_hang_and_an_earlier_one_does_not(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", Version(7, 1), seed=1)
    file = node_file(tmp_path / "state", engine(stub_model, evidence=LOOKS))
    if late:
        monkeypatch.setattr(evidence, "LATE_S", WITHIN_S + 5.0)
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await knobs(started, reload="hang")
        await player.decide(player.load(Version(7, 1), uri, digest))
        while record(file).load is None:
            await player.job.pulses()
        await player.ask(EngineStopped, player.stop())
        assert len(_looks(file)) == (2 if late else 0)
