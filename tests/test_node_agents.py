"""Agents beside each other and against each other: jobs, boots, epochs."""

from pathlib import Path

import anyio
import msgspec
import pytest

from relight.events.bus.embedded import Embedded
from relight.events.errors import Fenced
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, NodeSilent, NodeUp
from relight.events.ids import JobName, NodeName
from tests.node_support import (
    NODE,
    agent,
    alive,
    directing,
    engine,
    kill,
    node_file,
    playing,
    record,
    role,
    running,
    swept,
)

pytestmark = pytest.mark.anyio


async def test_two_jobs_on_one_host_never_touch_each_other(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    first = node_file(tmp_path / "a", engine(stub_model))
    second = node_file(tmp_path / "b", engine(stub_model), job=JobName("job-2"))
    async with directing(first, server.url) as one, directing(second, server.url) as two:
        ours = await one.ask(EngineStarted, one.start())
        theirs = await two.ask(EngineStarted, two.start())
        assert ours.address != theirs.address
        kill(role(first, "leader"))
        await one.wait(EngineDead)
        await one.ask(EngineStopped, one.stop())
        assert all(map(alive, theirs.processes))
        with pytest.raises(TimeoutError):
            await two.wait(EngineDead, within_s=0.5)


async def test_an_agent_whose_name_another_one_took_stops_and_leaves_its_engines(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    old = node_file(tmp_path / "old", engine(stub_model))
    new = node_file(tmp_path / "new", engine(stub_model))
    with swept(old):
        async with playing(server.url) as player:
            async with anyio.create_task_group() as tasks:
                fenced = anyio.Event()

                async def serve_until_fenced() -> None:
                    with pytest.raises(Fenced):
                        await agent.serve(old, bus_url=server.url)
                    fenced.set()

                tasks.start_soon(serve_until_fenced)
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start())
                async with running(new, server.url):
                    await player.wait(NodeUp)
                    kill(role(old, "worker"))
                    with anyio.fail_after(10):
                        await fenced.wait()
            assert alive(started.processes[0]) or record(old).dead
            assert not player.seen(EngineDead)


async def test_a_first_report_is_said_under_the_epoch_of_the_state_that_was_read(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    async with playing(server.url) as player, running(file, server.url):
        assert (await player.wait(NodeUp)).max_epoch == player.lease.epoch


async def test_an_agent_that_was_called_silent_says_what_is_true(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        await player.ask(EngineStarted, player.start())
        await player.decide(NodeSilent(node=NodeName("node-z"), since=0))
        await player.decide(NodeSilent(node=NODE, since=0))
        up = await player.wait(NodeUp)
        assert [each.state for each in up.engines] == ["paused"]
        with pytest.raises(TimeoutError):
            await player.wait(NodeUp, within_s=0.3)


async def test_decisions_of_a_lost_epoch_have_no_effect_also_after_a_restart(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            async with running(file, server.url, stop_engines=False):
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start())
            async with running(file, server.url):
                up = await player.wait(NodeUp)
                assert up.max_epoch == player.lease.epoch
                old = msgspec.structs.replace(player.stop(), epoch=player.lease.epoch - 1)
                await player.decide(old)
                again = await player.wait(NodeUp)
                assert again.max_epoch == player.lease.epoch
                watched = msgspec.structs.replace(player.stop(), dry_run=True)
                await player.decide(watched)
                with pytest.raises(TimeoutError):
                    await player.wait(EngineStopped, within_s=0.5)
                assert all(map(alive, started.processes))
