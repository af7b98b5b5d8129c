"""Engines that come to a node when their own is lost: taken, kept, refused, ended, and one whole move."""

import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relight.agents.node import config, marks
from relight.agents.node.config import NodeFile, Spare, checked
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.decisions import ReportRequested, RouteAdded, StartEngine, StopEngine
from relight.events.errors import UsageError
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, NodeSilent, NodeUp, StartFailed
from relight.events.ids import EngineName, NodeName
from relight.events.schema import EngineState, Left
from relight.events.values import Avoided, Phase
from relight.orchestrator.settings import Settings
from tests.node_support import (
    JOB,
    NODE,
    Player,
    agent_process,
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
from tests.orchestrator_support import orchestrating
from tests.streams import Streams

pytestmark = pytest.mark.anyio

E0, E1, GUEST = EngineName("e0"), EngineName("e1"), EngineName("g0")
OTHER = NodeName("node-b")
DEVICES = "CUDA_VISIBLE_DEVICES"


def with_spare(state: Path, model: Path, *, slots: int = 1, own: int = 1, **more: Any) -> NodeFile:
    """A node of `own` engines e0, e1, …, where g0 and g1 may come."""
    engines = tuple(engine(model, name=f"e{index}", env={DEVICES: str(index)}) for index in range(own))
    guests = tuple(engine(model, name=f"g{index}", env={DEVICES: "7"}) for index in range(2))
    spare = Spare(slots=slots, engines=guests, **more)
    file = NodeFile(job=JOB, node=NODE, state_dir=str(state), engines=engines, spare=spare)
    return checked(file, where="test")


@contextmanager
def all_swept(file: NodeFile) -> Iterator[None]:
    """Guests too."""
    assert file.spare is not None
    with swept(msgspec.structs.replace(file, engines=(*file.engines, *file.spare.engines))):
        yield


@asynccontextmanager
async def hosting(file: NodeFile, url: str) -> AsyncIterator[Player]:
    with all_swept(file):
        async with directing(file, url) as player:
            yield player


def report(player: Player) -> ReportRequested:
    return ReportRequested(**player.head(), node=NODE, deadline=player.deadline())


async def room(player: Player, spares: int) -> NodeUp:
    """The next report that tells of so much room."""
    return await player.wait(NodeUp, lambda up: up.spares == spares)


def elsewhere(player: Player, name: EngineName, incarnation: int) -> StartEngine:
    """The engine's start on another node."""
    return msgspec.structs.replace(player.start(incarnation, engine=name), node=OTHER)


async def test_a_guest_is_started_reported_and_stopped_as_an_own_engine_is(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model, devices=("3",), each="1 GPU")
    async with hosting(file, server.url) as player:
        up = player.seen(NodeUp)[0]
        assert (up.spares, up.each, [each.engine for each in up.engines]) == (1, "1 GPU", ["e0"])
        started = await player.ask(EngineStarted, player.start(4, engine=GUEST))
        assert (started.incarnation, started.device) == (4, "3")
        await player.decide(report(player))
        told = await player.wait(NodeUp)
        assert told.spares == 0
        assert {each.engine: each.state for each in told.engines} == {"e0": "absent", "g0": "paused"}
        kill(role(file, "core", GUEST))
        dead = await player.wait(EngineDead)
        assert (dead.engine, dead.device) == (GUEST, "3")
        stopped = await player.ask(EngineStopped, player.stop(4, engine=GUEST))
        assert set(started.processes) <= set(stopped.proof.processes)
        again = await player.ask(EngineStarted, player.start(5, engine=GUEST))
        assert again.address != started.address  # its port rests


async def test_a_guest_whose_place_is_elsewhere_again_makes_room(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model)
    async with hosting(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start(2, engine=GUEST))
        await player.decide(elsewhere(player, GUEST, 3))
        stopped = await player.ask(EngineStopped, player.stop(2, engine=GUEST))
        assert set(started.processes) <= set(stopped.proof.processes)
        assert [each.engine for each in (await room(player, 1)).engines] == ["e0"]


async def test_a_guest_outlives_its_agent_whatever_has_become_of_the_node_file(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model, devices=("3",))
    with all_swept(file):
        async with playing(server.url) as player:
            with agent_process(file, server.url, tmp_path / "node.json") as process:
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start(2, engine=GUEST))
                process.kill()
            assert all(map(alive, started.processes))
            without = msgspec.structs.replace(file, spare=None)
            async with running(without, server.url):
                up = await player.wait(NodeUp, lambda up: len(up.engines) == 2)
                assert [(e.engine, e.incarnation, e.state) for e in up.engines][1] == (GUEST, 2, "paused")
                assert await player.ask(EngineStarted, player.start(2, engine=GUEST)) is not None
                kill(role(file, "core", GUEST))
                assert (await player.wait(EngineDead)).engine == GUEST


async def test_a_guest_is_found_again_by_an_agent_that_lost_its_disk(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model)
    with all_swept(file):
        async with playing(server.url) as player:
            with agent_process(file, server.url, tmp_path / "node.json"):
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start(2, engine=GUEST))
            shutil.rmtree(file.state_path / "engines" / GUEST)
            (file.state_path / "stays.json").unlink()
            async with running(file, server.url):
                up = await player.wait(NodeUp, lambda up: len(up.engines) == 2)
                assert [(e.engine, e.incarnation, e.state) for e in up.engines][1] == (GUEST, 2, "unknown")
                stopped = await player.ask(EngineStopped, player.stop(2, engine=GUEST))
                assert set(started.processes) <= set(stopped.proof.processes)


async def test_what_cannot_come_is_refused_with_the_reason_and_a_proof(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model)
    async with hosting(file, server.url) as player:
        stranger = await player.ask(StartFailed, player.start(1, engine=EngineName("x9")))
        assert (stranger.cause, stranger.retryable) == ("undefined", False)
        assert "no definition of x9; it has e0, g0, g1" in stranger.detail
        await player.ask(EngineStarted, player.start(1, engine=GUEST))
        full = await player.ask(StartFailed, player.start(1, engine=EngineName("g1")))
        assert (full.cause, full.retryable) == ("no-spare", True)
        assert "no place left; engines there: e0, g0" in full.detail
        await player.decide(report(player))
        told = await room(player, 0)
        assert [each.engine for each in told.engines] == ["e0", "g0"]
        await player.decide(elsewhere(player, GUEST, 2), player.stop(1, engine=GUEST))
        await room(player, 1)
        assert await player.ask(EngineStarted, player.start(2, engine=EngineName("g1"))) is not None


async def test_the_end_of_what_was_never_here_is_proven(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model)
    async with hosting(file, server.url) as player:
        for name in (GUEST, EngineName("x9")):
            stopped = await player.ask(EngineStopped, player.stop(3, engine=name))
            assert (stopped.node, stopped.incarnation, stopped.proof.processes) == (NODE, 3, ())
            again = await player.ask(EngineStopped, player.stop(3, engine=name))
            assert again.proof.processes == ()
        await player.decide(report(player))
        assert [each.engine for each in (await player.wait(NodeUp)).engines] == ["e0"]


async def test_what_was_left_here_is_stopped_as_soon_as_the_state_is_read(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model)
    with all_swept(file):
        async with playing(server.url) as player:
            with agent_process(file, server.url, tmp_path / "node.json"):
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start(2, engine=E0))
            order = player.stop(2, engine=E0)
            left = Left(incarnation=2, node=NODE, processes=started.processes, intent=order)
            await player.decide(e0=EngineState(phase=Phase.STARTING, node=OTHER, incarnation=3, left=(left,)))
            async with running(file, server.url):
                stopped = await player.wait(EngineStopped)
                assert stopped.answers == order.id and set(started.processes) <= set(stopped.proof.processes)
                assert (await room(player, 2)).engines[0].engine == E0


async def test_the_place_of_an_own_engine_that_is_elsewhere_takes_another_and_it_comes_home_all_the_same(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model, slots=0, own=2)
    async with hosting(file, server.url) as player:
        await player.decide(elsewhere(player, E0, 1))
        await room(player, 1)
        guest = await player.ask(EngineStarted, player.start(1, engine=GUEST))
        assert guest.device == "0"
        full = await player.ask(StartFailed, player.start(2, engine=E0))
        assert full.cause == "no-spare"
        await player.decide(elsewhere(player, E1, 1))
        await room(player, 1)
        home = await player.ask(EngineStarted, player.start(3, engine=E0))
        assert home.device == "1"  # where there is room
        assert record(file, E0).incarnation == 3


@pytest.mark.parametrize("slots", [0, 1])
async def test_an_engine_that_comes_home_to_an_agent_that_begins_is_no_second_one_on_the_device_of_a_guest(
    server: Embedded, tmp_path: Path, stub_model: Path, slots: int
) -> None:
    file = with_spare(tmp_path / "state", stub_model, slots=slots, devices=("0",) * slots)
    own = msgspec.structs.replace(file.engines[0], env={DEVICES: "3"})
    file = msgspec.structs.replace(file, engines=(own,))
    with all_swept(file):
        async with playing(server.url) as player:
            with agent_process(file, server.url, tmp_path / "node.json"):
                await room(player, slots)
                await player.decide(elsewhere(player, E0, 1))
                await room(player, slots + 1)
                taken = player.start(1, engine=GUEST, avoid=(Avoided(NODE, ("0",)),))
                assert (await player.ask(EngineStarted, taken)).device == "3"
            home = player.start(2)
            state = EngineState(phase=Phase.STARTING, node=NODE, incarnation=2, intent=home)
            await player.decide(home, e0=state)
            async with running(file, server.url):
                if slots:
                    assert (await player.wait(EngineStarted)).device == "0"
                else:
                    assert (await player.wait(StartFailed)).cause == "no-spare"


async def test_a_device_to_be_avoided_is_left_for_a_free_one_and_by_the_next_that_comes(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model, devices=("3",))
    avoid = (Avoided(NODE, ("0",)),)
    async with hosting(file, server.url) as player:
        assert (await player.ask(EngineStarted, player.start(1))).device == "0"
        asked_again = await player.ask(EngineStarted, player.start(1, avoid=avoid))
        assert asked_again.device == "0", "what is up stays where it is"
        await player.ask(EngineStopped, player.stop(1))
        elsewhere_only = await player.ask(EngineStarted, player.start(2, avoid=(Avoided(OTHER, ("0",)),)))
        assert elsewhere_only.device == "0"
        await player.ask(EngineStopped, player.stop(2))
        assert (await player.ask(EngineStarted, player.start(3, avoid=avoid))).device == "3"
        await player.ask(EngineStopped, player.stop(3))
        assert (await player.ask(EngineStarted, player.start(4))).device == "3", "it stays where it went"
        guest = await player.ask(EngineStarted, player.start(1, engine=GUEST, avoid=avoid))
        assert guest.device == "0", "where there is no other, that one is taken"


async def test_an_engine_that_comes_home_leaves_its_old_spare_to_the_guest_that_is_there(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model, devices=("3",))
    avoid = (Avoided(NODE, ("0",)),)
    async with hosting(file, server.url) as player:
        assert (await player.ask(EngineStarted, player.start(1, avoid=avoid))).device == "3"
        await player.ask(EngineStopped, player.stop(1))
        await player.decide(elsewhere(player, E0, 2))
        guest = await player.ask(EngineStarted, player.start(1, engine=GUEST, avoid=avoid))
        assert guest.device == "3"
        home = await player.ask(EngineStarted, player.start(3, avoid=avoid))
        assert home.device == "0", "one engine a device"


async def test_a_place_without_a_device_of_its_own_is_no_way_around_a_device(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = with_spare(tmp_path / "state", stub_model)
    async with hosting(file, server.url) as player:
        await player.ask(EngineStarted, player.start(1))
        await player.ask(EngineStopped, player.stop(1))
        again = player.start(2, avoid=(Avoided(NODE, ("0",)),))
        assert (await player.ask(EngineStarted, again)).device == "0"
        assert (await player.ask(EngineStarted, player.start(1, engine=GUEST))).device == "7"


async def test_a_node_file_names_what_is_wrong_with_its_spares(tmp_path: Path, stub_model: Path) -> None:
    base = f'''job = "grpo-1"
node = "node-a"
state_dir = "{tmp_path}"
[spare]
slots = 1
[[spare.engines]]
name = "g0"
command = ["{sys.executable}", "{{port}}"]
'''
    path = tmp_path / "node.toml"
    path.write_text(base)
    assert config.load(path).engines == ()
    for change, by, words in (
        ("slots = 1", "slots = -1", "$.spare.slots -1"),
        ("slots = 1", "slot = 1", "unknown field `slot`"),
        ("slots = 1", 'slots = 2\ndevices = ["0"]', "$.spare.devices has 1 entries for 2 slots"),
        ('name = "g0"', 'name = "G"', "$.spare.engines[0].name"),
        ("{port}", "8000", "$.spare.engines[0].command"),
        (base[base.index("[[spare") :], "", "$.spare.engines is empty"),
    ):
        path.write_text(base.replace(change, by))
        with pytest.raises(UsageError) as error:
            config.load(path)
        assert words in str(error.value)


SOON = Settings(node_silence_s=1.5, move_after_s=0.5, backoff_s=0.1)


async def test_an_engine_of_a_lost_node_goes_to_the_spare_and_what_it_left_ends_when_the_node_returns(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    lost = node_file(tmp_path / "lost", engine(stub_model, name="g0"), node=OTHER)
    file = with_spare(tmp_path / "state", stub_model)
    with all_swept(file), swept(lost):
        async with orchestrating(server.url, jobs=(JOB,), settings=SOON), open_bus(server.url) as bus:
            heard = Streams(bus.job(JOB))
            async with running(file, server.url):
                with agent_process(lost, server.url, tmp_path / "lost.json"):
                    first = await heard.until(RouteAdded, lambda it: it.engine == GUEST)
                    assert first.incarnation == 1
                old = record(lost, GUEST)
                assert (await heard.until(NodeSilent)).node == OTHER
                moved = await heard.until(StartEngine, lambda it: it.engine == GUEST)
                assert (moved.node, moved.incarnation) == (NODE, 2)
                assert all(alive(member.process) for member in old.members)  # nobody said that it is gone
                second = await heard.until(RouteAdded, lambda it: it.engine == GUEST)
                assert (second.incarnation, second.address == first.address) == (2, False)
                async with running(lost, server.url):
                    end = await heard.until(StopEngine, lambda it: it.node == OTHER)
                    assert end.incarnation == 1
                    await heard.until(EngineStopped, lambda it: (it.node, it.incarnation) == (OTHER, 1))
                    assert not any(alive(member.process) for member in old.members)
                assert all(alive(member.process) for member in record(file, GUEST).members)
                assert marks.family(marks.slot_id(JOB, state_dir=lost.state_path), GUEST) == {}
