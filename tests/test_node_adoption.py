"""The agent may be killed at any moment: engines live on, and its successor loses nothing."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from relight.agents.node import marks, proc
from relight.agents.node.config import NodeFile
from relight.agents.node.proc import Liveness
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded, embedded
from relight.events.decisions import RouteAdded, SyncWeights
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    NodeUp,
    PauseExpired,
    StartFailed,
)
from relight.events.ids import BEGINNING, SyncId
from relight.events.schema import EngineState, Meta, OpenSync
from relight.events.values import Member, Phase, Process
from relight.events.version import BASE, Version
from tests.node_support import (
    E0,
    JOB,
    NODE,
    Player,
    agent_process,
    engine,
    kill,
    node_file,
    playing,
    post,
    record,
    role,
    running,
    swept,
)

pytestmark = pytest.mark.anyio


def _alive(processes: tuple[Process, ...]) -> list[bool]:
    return [proc.liveness(process) is Liveness.ALIVE for process in processes]


async def _started(file: NodeFile, url: str, tmp_path: Path, player: Player) -> EngineStarted:
    """Started and proven under an agent that was killed afterwards."""
    with agent_process(file, url, tmp_path / "node.json"):
        await player.wait(NodeUp)
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
    return started


async def test_a_killed_agents_engines_are_adopted_and_watched_again(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            started = await _started(file, server.url, tmp_path, player)
            assert all(_alive(started.processes))
            async with running(file, server.url):
                up = await player.wait(NodeUp)
                assert [(e.state, e.incarnation, e.address) for e in up.engines] == [
                    ("up", 1, started.address)
                ]
                assert set(up.engines[0].processes) == set(started.processes)
                kill(role(file, "core"))
                dead = await player.wait(EngineDead)
                assert dead.signal == 9
                stopped = await player.ask(EngineStopped, player.stop())
                assert set(started.processes) <= set(stopped.proof.processes)


async def test_a_death_while_no_agent_was_there_is_told(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            await _started(file, server.url, tmp_path, player)
            kill(role(file, "worker"))
            async with running(file, server.url):
                dead = await player.wait(EngineDead)
                assert dead.incarnation == 1
                up = await player.wait(NodeUp)
                assert up.engines[0].state == "absent"
                await player.ask(EngineStopped, player.stop())
            async with running(file, server.url):
                await player.wait(NodeUp)
            assert len(player.seen(EngineDead)) == 1


async def test_a_half_started_incarnation_of_a_dead_agent_is_killed_and_told(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--slow-start-s", "60"))
    with swept(file):
        async with playing(server.url) as player:
            order = player.start()
            with agent_process(file, server.url, tmp_path / "node.json"):
                await player.wait(NodeUp)
                await player.decide(order)
                slot = marks.slot_id(file.job, state_dir=file.state_path)
                while len(marks.family(slot, file.engines[0].name).get(1, ())) < 3:
                    await anyio.sleep(0.05)
            async with running(file, server.url):
                failed = await player.wait(StartFailed)
                assert failed.answers == order.id
                assert len(failed.proof.processes) == 3
                assert not any(_alive(failed.proof.processes))


async def test_an_interrupted_stop_is_taken_up(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--ignore-sigterm", grace_s=30.0))
    with swept(file):
        async with playing(server.url) as player:
            with agent_process(file, server.url, tmp_path / "node.json"):
                await player.wait(NodeUp)
                await player.ask(EngineStarted, player.start())
                order = player.stop(seconds=60, then="drained")
                await player.decide(order)
                while record(file).phase != "stopping":
                    await anyio.sleep(0.02)
            async with running(file, server.url):
                stopped = await player.wait(EngineStopped)
                assert stopped.answers == order.id
                assert not any(_alive(stopped.proof.processes))
            async with running(file, server.url):
                while (up := await player.wait(NodeUp)).engines[0].state != "drained":
                    pass
                assert up.engines[0].incarnation == 1


async def test_an_agent_without_its_bus_supervises_on_and_tells_later(
    tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        with embedded(tmp_path / "bus") as first:
            async with playing(first.url) as player:
                started = await _started(file, first.url, tmp_path, player)
        async with running(file, first.url):
            kill(role(file, "core"))
            while not record(file).dead:
                await anyio.sleep(0.02)
            assert _alive(started.processes).count(False) >= 1
            with embedded(tmp_path / "bus", port=first.port) as second:
                async with open_bus(second.url) as bus:
                    facts: list[str] = []
                    with anyio.fail_after(10):
                        while facts[-2:] != ["EngineDead", "NodeUp"]:
                            entries = await bus.job(JOB).read_facts(BEGINNING)
                            facts = [entry.type for entry in entries]
                            await anyio.sleep(0.05)


async def test_a_lost_disk_is_a_new_boot_and_the_engine_is_taken_up_from_what_is_remembered(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            started = await _started(file, server.url, tmp_path, player)
            old = player.seen(NodeUp)[0].boot
            shutil.rmtree(file.state_path)
            state = EngineState(
                phase=Phase.SERVING,
                node=NODE,
                incarnation=1,
                address=started.address,
                version=BASE,
                processes=started.processes,
            )
            await player.decide(e0=state)
            async with running(file, server.url):
                up = await player.wait(NodeUp)
                assert up.boot != old
                assert [(e.state, e.incarnation, e.address) for e in up.engines] == [
                    ("up", 1, started.address)
                ]
                await player.ask(Healthy, player.verify(BASE))
                kill(role(file, "core"))
                await player.wait(EngineDead)
                stopped = await player.ask(EngineStopped, player.stop(processes=started.processes))
                assert set(started.processes) <= set(stopped.proof.processes)


async def test_a_lost_disk_in_the_middle_of_a_load_gives_unknown_since_the_weights_may_be_half_written(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            started = await _started(file, server.url, tmp_path, player)
            shutil.rmtree(file.state_path)
            state = EngineState(
                phase=Phase.SYNCING,
                node=NODE,
                incarnation=1,
                address=started.address,
                version=BASE,
                processes=started.processes,
                intent=player.load(Version(7, 1), "/nowhere", "sha256:0"),
            )
            await player.decide(e0=state)
            async with running(file, server.url):
                up = await player.wait(NodeUp)
                assert [(e.state, e.incarnation, e.version) for e in up.engines] == [("unknown", 1, None)]
                await player.ask(EngineStopped, player.stop(processes=started.processes))
                assert not any(_alive(started.processes))


async def test_a_lost_disk_and_no_memory_anywhere_gives_unknown_and_a_stop_still_proves(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            started = await _started(file, server.url, tmp_path, player)
            kill(role(file, "leader"))
            shutil.rmtree(file.state_path)
            async with running(file, server.url):
                up = await player.wait(NodeUp)
                assert [(e.state, e.incarnation) for e in up.engines] == [("unknown", 1)]
                order = player.stop(processes=started.processes, then="retired")
                stopped = await player.ask(EngineStopped, order)
                assert set(started.processes) <= set(stopped.proof.processes)
                assert not any(_alive(started.processes))
                assert stopped.proof.port_free == (stopped.proof.port is not None), "nobody knows its port"
            async with running(file, server.url):
                while (up := await player.wait(NodeUp)).engines[0].state != "retired":
                    pass


async def test_a_named_process_without_a_mark_is_never_killed(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    import subprocess

    from relight.events.facts import StopFailed

    file = node_file(tmp_path / "state", engine(stub_model))
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        stat = proc.read_stat(bystander.pid)
        assert stat is not None
        async with playing(server.url) as player, running(file, server.url):
            await player.wait(NodeUp)
            failed = await player.ask(StopFailed, player.stop(4, processes=(stat.process,)))
            assert str(bystander.pid) in failed.detail
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_a_start_after_a_lost_disk_doubles_nothing(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            started = await _started(file, server.url, tmp_path, player)
            shutil.rmtree(file.state_path)
            async with running(file, server.url):
                await player.wait(NodeUp)
                again = await player.ask(EngineStarted, player.start(2))
                assert not any(_alive(started.processes))
                assert all(_alive(again.processes))


async def test_a_start_that_a_lost_disk_hides_is_cleared_and_told_not_doubled(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            started = await _started(file, server.url, tmp_path, player)
            shutil.rmtree(file.state_path)
            async with running(file, server.url):
                await player.wait(NodeUp)
                failed = await player.ask(StartFailed, player.start())
                assert failed.cause == "interrupted"
                assert set(started.processes) <= set(failed.proof.processes)
                assert not any(_alive(started.processes))
                again = await player.ask(StartFailed, player.start())
                assert again.proof == failed.proof
                await player.ask(EngineStarted, player.start(2))


async def test_a_terminated_agent_leaves_its_engines_and_one_told_to_stops_them(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            async with running(file, server.url, stop_engines=False):
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start())
            assert all(_alive(started.processes))
            async with running(file, server.url, stop_engines=True):
                await player.wait(NodeUp)
            assert not any(_alive(started.processes))
            stopped = await player.wait(EngineStopped)
            assert stopped.proof.port_free
            up = await player.wait(NodeUp)
            assert up.engines[0].state == "absent"


async def _pushed_into(player: Player, started: EngineStarted) -> None:
    """A trainer's push that is under way, as the state tells it."""
    order = SyncWeights(
        **player.head(),
        sync=SyncId("s1"),
        run=7,
        boundary=1,
        version=Version(7, 1),
        members=(Member(E0, 1, started.address),),
        deadline=player.deadline(60),
    )
    state = EngineState(
        phase=Phase.SERVING,
        node=NODE,
        incarnation=1,
        address=started.address,
        version=BASE,
        processes=started.processes,
    )
    sync = OpenSync(order=order, pending=(E0,))
    await player.decide(order, meta=Meta(birth="test", run=7, sync=sync), e0=state)
    await post(started, "/pause?mode=keep")


async def _ends(player: Player, started: EngineStarted) -> None:
    """The push is over, and whoever paused the engine has left it so."""
    route = RouteAdded(**player.head(), engine=E0, incarnation=1, address=started.address, version=BASE)
    await player.decide(route)
    await player.wait(PauseExpired)


@pytest.mark.parametrize("disk", ["kept", "lost"])
async def test_an_engine_that_is_adopted_in_an_open_push_stays_lent_and_its_pause_is_the_trainers(
    server: Embedded, tmp_path: Path, stub_model: Path, disk: str
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, stall_s=0.5))
    with swept(file):
        async with playing(server.url) as player:
            started = await _started(file, server.url, tmp_path, player)
            await _pushed_into(player, started)
            if disk == "lost":
                shutil.rmtree(file.state_path)
            async with running(file, server.url):
                up = await player.wait(NodeUp)
                assert [(e.state, e.incarnation) for e in up.engines] == [("up", 1)]
                with pytest.raises(TimeoutError):
                    await player.wait(PauseExpired, within_s=2)
                assert not record(file).paused
                await _ends(player, started)
            assert not player.seen(EngineDead)


async def test_no_pause_is_judged_while_it_is_not_known_what_is_lent(
    tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, stall_s=0.5))
    with swept(file), ExitStack() as bus:
        first = bus.enter_context(embedded(tmp_path / "bus"))
        async with playing(first.url) as player:
            started = await _started(file, first.url, tmp_path, player)
            await _pushed_into(player, started)
            bus.close()
            async with running(file, first.url):
                while _asked_after_pause(file) < 5:
                    await anyio.sleep(0.05)
                bus.enter_context(embedded(tmp_path / "bus", port=first.port))
                await player.wait(NodeUp)
                with pytest.raises(TimeoutError):
                    await player.wait(PauseExpired, within_s=2)
                assert not player.seen(PauseExpired), "said before, and kept in the outbox"
                await _ends(player, started)
        assert not player.seen(EngineDead)


def _asked_after_pause(file: NodeFile) -> int:
    """How often its core was asked, and answered, since somebody paused it."""
    text = (file.state_path / "engines/e0/1/log").read_text()
    return text[text.rindex("/pause") :].count("/is_paused")
