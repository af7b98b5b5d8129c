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
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, Healthy, NodeUp
from relight.events.version import BASE
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
