"""Device memory: what was there before an engine, and the proof that it is back.

The port is held to one contract on each implementation: nvidia-ml-py on a library that stands for the
driver, and on the driver itself where there is one.
"""

import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from relight.agents.adapters import nvml
from relight.agents.adapters.nvml import Nvml
from relight.agents.node import devices, lifecycle, ports, proc, start
from relight.agents.node.devices import Before, Devices, DeviceUnknown, Memory, Use
from relight.agents.node.errors import NotProven
from relight.events.bus.embedded import Embedded, free_port
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, NodeUp, StartFailed, StopFailed
from relight.events.ids import EngineName
from relight.events.values import Cause, Process
from tests import fake_nvml
from tests.fake_nvml import Card
from tests.node_support import (
    agent,
    agent_process,
    alive,
    engine,
    kill,
    node_file,
    playing,
    record,
    role,
    swept,
)

pytestmark = pytest.mark.anyio

NO_PID = (1 << 22) + 1
"""Above what any kernel gives."""


@contextmanager
def helper() -> Iterator[Process]:
    """A process of this test's own."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stat = proc.read_stat(process.pid)
    assert stat is not None
    try:
        yield stat.process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["nvidia-ml-py", "driver"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Devices:
    if request.param == "nvidia-ml-py":
        return Nvml(fake_nvml.loaded(monkeypatch, Card("GPU-aa"), Card("GPU-bb")))
    found = nvml.found()
    if found is None:
        pytest.skip("no NVIDIA driver on this machine")
    return found


def test_devices_are_chosen_as_cuda_chooses_them(known: Devices) -> None:
    everything = known.select(None)
    assert everything and all(uuid.startswith("GPU-") for uuid in everything)
    assert known.select("0") == everything[:1]
    assert known.select(everything[-1]) == everything[-1:]
    assert known.select("") == () and known.select("-1") == ()
    assert known.select(f"0,{len(everything)},0") == everything[:1]


def test_a_device_tells_its_memory_and_an_unknown_one_is_unknown(known: Devices) -> None:
    device = known.look(known.select("0")[0])
    assert device.used_mib >= 0 and all(use.pid > 0 for use in device.uses)
    with pytest.raises(DeviceUnknown, match="GPU-none"):
        known.look("GPU-none")


async def test_memory_is_back_when_the_device_says_so_and_its_holder_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card("GPU-aa")
    kin: set[int] = set()
    memory = Memory(Nvml(fake_nvml.loaded(monkeypatch, card)), kin=lambda: kin)
    before = await memory.before(await memory.devices("0"))
    assert await memory.proven_back(before, visible="0", within_s=0) is True
    with helper() as other, helper() as sidecar:
        card.hold(other, 9000)
        kin.add(other.pid)  # another engine of ours came meanwhile
        assert await memory.proven_back(before, visible="0", within_s=0) is True
        card.hold(sidecar, 70_000)
        with pytest.raises(
            NotProven, match=rf"70000 MiB more .* pid {sidecar.pid} 70000 MiB \(.*sleep"
        ) as said:
            await memory.proven_back(before, visible="0", within_s=0)
        assert said.value.cause == "memory" and str(other.pid) not in str(said.value)
        kill(sidecar)
        assert await memory.proven_back(before, visible="0", within_s=5) is True
        card.lost = True
        with pytest.raises(NotProven, match="cannot be asked"):
            await memory.proven_back(before, visible="0", within_s=0)
    card.lost, card.hidden = False, True
    with helper() as unseen:
        card.hold(unseen, 500)
        with pytest.raises(NotProven, match="no process that the driver names"):
            await memory.proven_back(before, visible="0", within_s=0)


async def test_a_driver_that_never_answers_holds_up_its_own_question_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "ASK_S", 0.05)
    free = threading.Event()

    class Wedged:
        def select(self, visible: str | None) -> tuple[str, ...]:
            free.wait()
            return ()

        def look(self, uuid: str) -> devices.Device:
            raise DeviceUnknown("lost")

    memory = Memory(Wedged(), kin=set)
    assert await memory.devices(None) == (devices.UNRESOLVED,)
    free.set()
    assert await Memory(None, kin=set).proven_back((), visible=None, within_s=1) is None


async def test_memory_that_was_not_seen_before_is_back_only_when_nobody_else_is_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card("GPU-aa")
    kin: set[int] = set()
    memory = Memory(Nvml(fake_nvml.loaded(monkeypatch, card)), kin=lambda: kin)
    card.lost = True
    before = await memory.before(await memory.devices("0"))
    card.lost = False
    assert before == (Before("GPU-aa", None),)
    with helper() as other, helper() as sidecar:
        card.hold(other, 9000)
        kin.add(other.pid)
        assert await memory.proven_back(before, visible="0", within_s=0) is True
        card.hold(sidecar, 70_000)
        with pytest.raises(NotProven, match=rf"GPU-aa is held by pid {sidecar.pid} 70000 MiB .*not known"):
            await memory.proven_back(before, visible="0", within_s=0)
        card.hidden = True
        assert await memory.proven_back(before, visible="0", within_s=0) is None, "somebody is not named"
        card.hidden, card.lost = False, True
        with pytest.raises(NotProven, match="cannot be asked"):
            await memory.proven_back(before, visible="0", within_s=0)
        card.lost = False
        kill(sidecar)
        assert await memory.proven_back(before, visible="0", within_s=5) is True


class Lagging(Card):
    """Counts memory as used for two looks longer than it names who held it."""

    looks = 2

    @property
    def used(self) -> int:
        self.looks -= 1
        return super().used + (70_000 * fake_nvml.MIB if self.looks >= 0 else 0)


async def test_memory_is_waited_for_when_its_holder_is_not_named_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Lagging("GPU-aa")
    memory = Memory(Nvml(fake_nvml.loaded(monkeypatch, card)), kin=set)
    assert await memory.proven_back((Before("GPU-aa", None),), visible="0", within_s=5) is True
    assert card.looks < 0


class Constant:
    """A driver that always tells the same of its devices, and counts how often it was asked."""

    def __init__(self, *uses: Use, used_mib: float = 9600.0) -> None:
        self._told = devices.Device("GPU-aa", used_mib, uses)
        self.looks = 0

    def select(self, visible: str | None) -> tuple[str, ...]:
        return ("GPU-aa",)

    def look(self, uuid: str) -> devices.Device:
        self.looks += 1
        return self._told


@pytest.mark.parametrize(
    ("mib", "since", "used_mib", "back"),
    [
        (9000.0, 0, 9600.0, "held"),
        (None, 0, 600.0, "held"),
        (10.0, 0, 600.0, True),
        (9000.0, 1, 9600.0, None),
        (900.0, 1, 950.0, True),
    ],
)
async def test_of_a_device_that_was_not_seen_before_only_who_came_since_and_has_much_may_be_the_engines(
    mib: float | None, since: int, used_mib: float, back: bool | str | None
) -> None:
    with helper() as stranger:
        known = Constant(Use(stranger.pid, mib), used_mib=used_mib)
        first = Process(1, stranger.start + since)
        prove = partial(Memory(known, kin=set).proven_back, visible="0", within_s=0, processes=(first,))
        for before in (Before("GPU-aa", None), Before(devices.UNRESOLVED, None)):
            if back == "held":
                with pytest.raises(NotProven, match=f"held by pid {stranger.pid} .*not known"):
                    await prove((before,))
            else:
                assert await prove((before,)) is back


async def test_where_nobody_knows_when_an_engine_began_whoever_holds_much_may_be_its_own() -> None:
    with helper() as stranger:
        memory = Memory(Constant(Use(stranger.pid, 9000.0)), kin=set)
        with pytest.raises(NotProven, match=f"held by pid {stranger.pid}"):
            await memory.proven_back((Before("GPU-aa", None),), visible="0", within_s=0)


async def test_whose_memory_it_is_that_a_process_out_of_sight_holds_is_not_known() -> None:
    memory = Memory(Constant(Use(NO_PID, 9000.0)), kin=set)
    assert await memory.proven_back((Before("GPU-aa", None),), visible="0", within_s=0) is None
    small = Memory(Constant(Use(NO_PID, 10.0), used_mib=600.0), kin=set)
    assert await small.proven_back((Before("GPU-aa", None),), visible="0", within_s=0) is True


async def test_a_holder_on_a_device_that_an_engine_only_may_have_had_is_no_objection() -> None:
    with helper() as stranger:
        known = Constant(Use(stranger.pid, 9000.0))
        memory = Memory(known, kin=set)
        before = (Before(devices.UNRESOLVED, None),)
        assert await memory.proven_back(before, visible=None, within_s=0.5) is None
        assert known.looks == 1, "a wait could prove nothing"
        with pytest.raises(NotProven, match=f"held by pid {stranger.pid}"):
            await memory.proven_back(before, visible="0", within_s=0)


async def test_devices_that_were_not_told_before_a_start_are_asked_for_at_the_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card, other = Card("GPU-aa"), Card("GPU-bb")
    known = Nvml(fake_nvml.loaded(monkeypatch, card, other))
    real = known.select

    def wedged(_: str | None) -> tuple[str, ...]:
        raise DeviceUnknown("wedged")

    monkeypatch.setattr(known, "select", wedged)
    memory = Memory(known, kin=set)
    before = await memory.before(await memory.devices("0"))
    assert before == (Before(devices.UNRESOLVED, None),)
    assert await memory.proven_back(before, visible="0", within_s=0) is None
    monkeypatch.setattr(known, "select", real)
    with helper() as sidecar, helper() as elsewhere:
        other.hold(elsewhere, 70_000)
        assert await memory.proven_back(before, visible="0", within_s=0) is True
        card.hold(sidecar, 70_000)
        with pytest.raises(NotProven, match=f"pid {sidecar.pid}"):
            await memory.proven_back(before, visible="0", within_s=0)
    assert await memory.proven_back(before, visible="", within_s=0) is None, "it has no device"


def test_a_device_that_cannot_be_asked_leaves_the_others_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Card("GPU-aa"), Card("GPU-bb"), Card("GPU-cc")
    known = Nvml(fake_nvml.loaded(monkeypatch, *cards))
    cards[1].nameless = True
    lost = devices.UNRESOLVED
    assert known.select(None) == ("GPU-aa", lost, "GPU-cc")
    assert known.select("0,2") == known.select("GPU-aa,GPU-c") == ("GPU-aa", "GPU-cc")
    assert known.select("0,1") == known.select("GPU-aa,GPU-bb") == ("GPU-aa", lost)
    assert known.select("-1") == () and known.select("0,3,2") == ("GPU-aa",)


async def test_a_device_that_is_told_only_at_the_stop_leaves_what_is_known_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = Card("GPU-aa", used_mib=5000), Card("GPU-bb")
    memory = Memory(Nvml(fake_nvml.loaded(monkeypatch, *cards)), kin=set)
    cards[1].nameless = True
    before = await memory.before(await memory.devices("0,1"))
    assert before == (Before("GPU-aa", 5000.0), Before(devices.UNRESOLVED, None))
    assert await memory.proven_back(before, visible="0,1", within_s=0) is None
    cards[1].nameless = False
    assert await memory.proven_back(before, visible="0,1", within_s=0) is True
    with helper() as sidecar:
        for card in cards:
            card.hold(sidecar, 9000)
            with pytest.raises(NotProven, match=f"{card.uuid} .*pid {sidecar.pid}"):
                await memory.proven_back(before, visible="0,1", within_s=0)
            card.hold(sidecar, 0)


async def test_engines_whose_devices_are_not_told_do_not_wait_for_each_other() -> None:
    memory = Memory(Constant(), kin=set)
    with anyio.fail_after(5):
        async with memory.turn((devices.UNRESOLVED, "GPU-aa")), memory.turn((devices.UNRESOLVED, "GPU-bb")):
            pass


async def test_an_engine_whose_memory_is_pinned_stays_fenced_and_no_other_starts_on_its_device(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LEAST_S", 0.3)
    monkeypatch.setattr(lifecycle, "PROOF_S", 0.3)
    card = Card("GPU-aa")
    known = Nvml(fake_nvml.loaded(monkeypatch, card, Card("GPU-bb")))
    file = node_file(tmp_path / "state", engine(stub_model, env={"CUDA_VISIBLE_DEVICES": "0"}))
    with swept(file), helper() as sidecar:
        async with playing(server.url) as player, anyio.create_task_group() as tasks:

            async def serve() -> None:
                await agent.serve(file, bus_url=server.url, stop_engines=True, devices=known)

            tasks.start_soon(serve)
            await player.wait(NodeUp)
            started = await player.ask(EngineStarted, player.start())
            assert [(each.uuid, each.mib) for each in record(file).devices] == [("GPU-aa", 600.0)]
            card.hold(role(file, "core"), 60_000)
            card.hold(sidecar, 10_000)
            kill(role(file, "core"))
            await player.wait(EngineDead)
            failed = await player.ask(StopFailed, player.stop(seconds=0.3))
            assert failed.cause == "memory"
            assert f"pid {sidecar.pid} 10000 MiB" in failed.detail and "GPU-aa" in failed.detail
            assert not any(map(alive, started.processes))
            held = await player.ask(StartFailed, player.start(2))
            assert held.cause == "predecessor" and str(sidecar.pid) in held.detail
            kill(sidecar)
            stopped = await player.ask(EngineStopped, player.stop())
            assert stopped.proof.memory_back is True
            await player.ask(EngineStarted, player.start(2))
            tasks.cancel_scope.cancel()


class Pinned:
    """A device of which somebody has taken much between the first look at it and the end of the test's."""

    def __init__(self) -> None:
        self.looks = 0
        self.freed = False

    def select(self, visible: str | None) -> tuple[str, ...]:
        return ("GPU-aa",)

    def look(self, uuid: str) -> devices.Device:
        self.looks += 1
        return devices.Device(uuid, 600.0 if self.freed or self.looks == 1 else 9600.0, ())


async def test_a_first_try_that_is_not_proven_gone_is_told_and_its_agent_works_on(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "PROOF_S", 0.3)
    monkeypatch.setattr(lifecycle, "PROOF_S", 0.3)
    taken = ports.pick(())
    real, given = ports.pick, iter([taken])
    monkeypatch.setattr(ports, "pick", lambda refused: next(given, None) or real(refused))
    known = Pinned()
    file = node_file(tmp_path / "state", engine(stub_model, env={"CUDA_VISIBLE_DEVICES": "0"}))
    with swept(file), socket.create_server(("127.0.0.1", taken)):
        async with playing(server.url) as player, anyio.create_task_group() as tasks:

            async def serve() -> None:
                await agent.serve(file, bus_url=server.url, stop_engines=True, devices=known)

            tasks.start_soon(serve)
            await player.wait(NodeUp)
            dead = await player.ask(EngineDead, player.start())
            assert dead.cause is Cause.START
            assert "memory: device GPU-aa has 9000 MiB more" in dead.detail
            known.freed = True
            assert (await player.ask(EngineStopped, player.stop())).proof.memory_back is True
            await player.ask(EngineStarted, player.start(2))
            tasks.cancel_scope.cancel()


async def test_engines_of_one_device_start_one_after_another(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Nvml(fake_nvml.loaded(monkeypatch, Card("GPU-aa"), Card("GPU-bb")))
    names = [EngineName(f"e{index}") for index in range(3)]
    devices_of = {names[0]: "0", names[1]: "0", names[2]: "1"}
    engines = [
        engine(stub_model, "--slow-start-s", "0.5", name=name, env={"CUDA_VISIBLE_DEVICES": visible})
        for name, visible in devices_of.items()
    ]
    file = node_file(tmp_path / "state", *engines)
    with swept(file):
        async with playing(server.url) as player, anyio.create_task_group() as tasks:

            async def serve() -> None:
                await agent.serve(file, bus_url=server.url, stop_engines=True, devices=known)

            tasks.start_soon(serve)
            await player.wait(NodeUp)
            await player.decide(*(player.start(engine=name) for name in names))
            up = [await player.wait(EngineStarted) for _ in names]
            began = {name: proc.read_stat(role(file, "leader", name).pid) for name in names}
            shared = sorted(stat.start for stat in (began[names[0]], began[names[1]]) if stat)
            assert len(up) == 3 and (shared[1] - shared[0]) / proc.TICKS_A_SECOND >= 0.5
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("named", [True, False])
async def test_an_engine_that_no_record_speaks_of_is_proven_with_its_port_and_its_devices(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setattr(lifecycle, "LEAST_S", 0.3)
    card = Card("GPU-aa", used_mib=400)
    known = Nvml(fake_nvml.loaded(monkeypatch, card))
    port = free_port()
    env = {"CUDA_VISIBLE_DEVICES": "0"} if named else {}
    file = node_file(tmp_path / "state", engine(stub_model, port=port, env=env))
    with swept(file), ExitStack() as helpers:
        card.hold(helpers.enter_context(helper()), 500)  # it was there before
        async with playing(server.url) as player:
            with agent_process(file, server.url, tmp_path / "node.json"):
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start())
            for process in started.processes:
                kill(process)
            shutil.rmtree(file.state_path)
            sidecar = helpers.enter_context(helper())
            card.hold(sidecar, 10_000)
            async with anyio.create_task_group() as tasks:

                async def serve() -> None:
                    await agent.serve(file, bus_url=server.url, devices=known)

                tasks.start_soon(serve)
                await player.wait(NodeUp)
                stop = partial(player.stop, processes=started.processes, seconds=0.3)
                with socket.create_server(("127.0.0.1", port)):
                    failed = await player.ask(StopFailed, stop())
                    assert failed.cause == "port" and str(port) in failed.detail
                if named:
                    failed = await player.ask(StopFailed, stop())
                    assert failed.cause == "memory" and f"held by pid {sidecar.pid} 10000" in failed.detail
                    kill(sidecar)
                proof = (await player.ask(EngineStopped, stop())).proof
                assert set(started.processes) <= set(proof.processes)
                assert (proof.port, proof.port_free) == (port, True)
                assert proof.memory_back is (True if named else None), "it may have had another device"
                tasks.cancel_scope.cancel()
