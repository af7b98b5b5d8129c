"""Engines that an application starts: the agent asks, believes what the kernel confirms, proves the end."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from relight.agents.node import lifecycle
from relight.agents.node.config import Engine, NodeFile
from relight.agents.node.delegated import wire
from relight.agents.node.delegated.application import delegate
from relight.events.bus.embedded import Embedded
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    NodeUp,
    StartFailed,
    StopFailed,
)
from relight.events.values import Process
from relight.events.version import BASE, Version
from tests.node_support import (
    E0,
    JOB,
    NODE,
    agent_process,
    alive,
    directing,
    engine,
    kill,
    node_file,
    playing,
    role,
    running,
    swept,
    write_snapshot,
)

pytestmark = pytest.mark.anyio
SCRIPT = Path(__file__).with_name("delegating_app.py")
WITHIN_S = 15.0


def delegated(model: Path, *knobs: str, **changes: Any) -> Engine:
    return engine(model, *knobs, launcher="delegated", **changes)


class Application:
    """A running one, and what it says."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    async def says(self, word: str) -> list[str]:
        """The rest of its next line that begins with `word`."""
        assert self.process.stdout is not None
        with anyio.fail_after(WITHIN_S):
            while True:
                line = await anyio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
                assert line, f"it ended and never said {word}"
                first, *rest = line.split()
                if first == word:
                    return rest

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@contextmanager
def application(file: NodeFile, mode: str, *, engines: str = "e0") -> Iterator[Application]:
    """An application that fills these slots; it is killed afterwards, its engines are the agent's to end."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(file.state_path), engines, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Application(process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("mode", ["good", "inside"])
async def test_an_application_starts_engines_that_are_watched_stopped_and_proven_like_any_other(
    server: Embedded, tmp_path: Path, stub_model: Path, mode: str
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model))
    async with directing(file, server.url) as player:
        with application(file, mode) as app:
            await app.says("ready")
            assert (file.state_path / "agent.sock").stat().st_mode & 0o777 == 0o600
            started = await player.ask(EngineStarted, player.start())
            assert len(started.processes) == 3 and started.weights is None
            await player.ask(Healthy, player.verify(BASE))
            kill(role(file, "core"))
            dead = await player.wait(EngineDead)
            assert (dead.cause, dead.signal) == ("signal", 9)
            stopped = await player.ask(EngineStopped, player.stop())
            assert set(started.processes) <= set(stopped.proof.processes)
            assert await app.says("ended") == ["e0", "1"]
            assert app.process.poll() is None, "the application itself is nobody's engine"
            again = await player.ask(EngineStarted, player.start(2))
            kill(role(file, "leader"))
            await player.wait(EngineDead)
            stopped = await player.ask(EngineStopped, player.stop(2))
            assert not any(map(alive, again.processes)) and stopped.proof.port_free


async def test_an_application_is_told_the_weights_and_says_whether_it_used_them(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    from relight.events.values import Weights

    version = Version(7, 1)
    uri, digest = write_snapshot(tmp_path / "w1", version, seed=1)
    plain = delegated(stub_model)
    command = tuple("{weights}" if word == str(stub_model) else word for word in plain.command)
    ours = msgspec.structs.replace(plain, command=command, model=str(stub_model))
    file = node_file(tmp_path / "state", ours)
    async with directing(file, server.url) as player:
        with application(file, "good") as app:
            await app.says("ready")
            order = player.start(weights=Weights(version=version, uri=uri, digest=digest))
            assert (await player.ask(EngineStarted, order)).weights == version
            await player.ask(Healthy, player.verify(version, digest=digest))


async def test_its_engines_outlive_the_application_and_a_new_one_takes_the_slot(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model))
    async with directing(file, server.url) as player:
        with application(file, "good") as app:
            await app.says("ready")
            started = await player.ask(EngineStarted, player.start())
            with application(file, "good") as second:
                told = await second.says("refused")
                assert "filled by another application" in " ".join(told)
        assert all(map(alive, started.processes))
        await player.ask(Healthy, player.verify(BASE))
        kill(role(file, "leader"))
        await player.wait(EngineDead)
        await player.ask(EngineStopped, player.stop())
        await player.decide(player.start(2))  # waits for somebody to come
        with application(file, "good") as third:
            await third.says("asked")
            await player.wait(EngineStarted)


async def test_a_restarted_agent_adopts_engines_of_an_application_and_asks_it_again(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model))
    with swept(file), ExitStack() as stack:
        async with playing(server.url) as player:
            with agent_process(file, server.url, tmp_path / "node.json"):
                await player.wait(NodeUp)
                app = stack.enter_context(application(file, "good"))
                await app.says("ready")
                started = await player.ask(EngineStarted, player.start())
            assert all(map(alive, started.processes))
            async with running(file, server.url):
                up = await player.wait(NodeUp)
                assert [(each.state, each.incarnation) for each in up.engines] == [("paused", 1)]
                assert set(started.processes) == set(up.engines[0].processes)
                kill(role(file, "worker"))
                await player.wait(EngineDead)
                await player.ask(EngineStopped, player.stop())
                await player.ask(EngineStarted, player.start(2))
                assert [await app.says("asked") for _ in range(2)] == [["e0", "1"], ["e0", "2"]]


async def test_a_start_that_a_dead_agent_asked_for_is_ended_by_its_successor(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model))
    with swept(file), ExitStack() as stack:
        async with playing(server.url) as player:
            order = player.start()
            with agent_process(file, server.url, tmp_path / "node.json"):
                await player.wait(NodeUp)
                app = stack.enter_context(application(file, "late"))
                await app.says("ready")
                await player.decide(order)
                await app.says("asked")
            async with running(file, server.url):
                await app.says("withdrawn")
                assert not player.seen(StartFailed)
                app.tell("go")
                failed = await player.wait(StartFailed)
                assert failed.answers == order.id and failed.proof.processes
                assert not any(map(alive, failed.proof.processes))


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("raises", "no room on device 3"),
        ("dies", "ended before it reported the engine"),
        ("gone", "is not alive"),
        ("nobody", "is another user's"),
        ("agent", "is no engine but above it"),
        ("stranger", "neither the application's child nor bears the engine's mark"),
    ],
)
async def test_what_the_kernel_does_not_confirm_is_refused(
    server: Embedded, tmp_path: Path, stub_model: Path, mode: str, said: str
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model))
    bystander = subprocess.Popen(["sleep", "60"])
    pids = {"agent": os.getpid(), "stranger": bystander.pid}
    if mode == "nobody" and os.geteuid() != 0:
        pids["nobody"] = 1
    try:
        async with directing(file, server.url) as player:
            with application(file, f"pid={pids[mode]}" if mode in pids else mode) as app:
                await app.says("ready")
                failed = await player.ask(StartFailed, player.start())
                assert failed.cause == "application" and said in failed.detail
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_an_application_that_fills_no_slot_of_this_node_is_refused(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model), engine(stub_model, name="e1"))
    async with directing(file, server.url):
        with application(file, "good", engines="e0,e1") as app:
            assert "it fills e1; this node delegates e0" in " ".join(await app.says("refused"))


async def test_nothing_is_proven_gone_while_an_application_may_still_start_it(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LEAST_S", 0.5)
    file = node_file(tmp_path / "state", delegated(stub_model))
    async with directing(file, server.url) as player:
        with application(file, "late") as app:
            await app.says("ready")
            await player.decide(player.start())
            await app.says("asked")
            failed = await player.ask(StopFailed, player.stop(seconds=0.5))
            assert str(app.process.pid) in failed.detail and "may still do so" in failed.detail
            stop = player.stop()
            await player.decide(stop)
            app.tell("go")
            pid = int((await app.says("started"))[2])
            stopped = await player.wait(EngineStopped)
            assert stopped.answers == stop.id
            assert pid in {process.pid for process in stopped.proof.processes}
            assert not any(map(alive, stopped.proof.processes))
        assert not player.seen(EngineStarted)


async def test_an_application_that_never_answers_is_named_and_its_end_frees_the_slot(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model))
    async with directing(file, server.url) as player:
        with application(file, "late") as app:
            await app.says("ready")
            await player.decide(player.start(seconds=0.5))
            assert await app.says("withdrawn") == ["e0", "1"]
        failed = await player.wait(StartFailed)
        assert failed.cause == "deadline" and "has not reported it" in failed.detail
        with application(file, "good") as app:
            await player.ask(EngineStarted, player.start(2))


async def test_a_start_that_is_tried_again_is_asked_for_again_once_the_first_is_told_gone(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model, "--reload", "spoil"))
    async with directing(file, server.url) as player:
        with application(file, "good") as app:
            await app.says("ready")
            started = await player.ask(EngineStarted, player.start())
            assert (started.incarnation, started.reloads) == (1, False)
            first = await app.says("started")
            _, _, *why = await app.says("ended")
            assert "the canary did not return" in " ".join(why)
            assert await app.says("asked") == ["e0", "1"]
            second = await app.says("started")
            assert first != second and int(second[2]) == role(file, "leader").pid
            await player.ask(EngineStopped, player.stop())


class Line:
    """One end of the socket in a test's hands."""

    def __init__(self, channel: socket.socket) -> None:
        channel.settimeout(WITHIN_S)
        self._channel = channel
        self._file = channel.makefile("rb")

    def says(self, said: wire.Said) -> None:
        self._channel.sendall(wire.line(said))

    def hears(self, kind: "msgspec.json.Decoder[Any]") -> Any:
        return kind.decode(self._file.readline())

    def close(self) -> None:
        self._file.close()
        self._channel.close()


def test_an_application_answers_each_launch_also_one_that_was_lost_or_comes_again(tmp_path: Path) -> None:
    me = Process(os.getpid(), 0)
    asked: list[int] = []

    def start(order: Any) -> list[int]:
        asked.append(order.incarnation)
        return [me.pid]

    def launch(number: int) -> wire.Launch:
        return wire.Launch(engine=E0, incarnation=1, number=number, port=1, within_s=WITHIN_S)

    with socket.socket(socket.AF_UNIX) as listener, wire.door(tmp_path) as path:
        listener.bind(path)
        listener.listen()
        listener.settimeout(WITHIN_S)
        threads = delegate(tmp_path, {E0: start})

        def meet() -> Line:
            line = Line(listener.accept()[0])
            assert line.hears(wire.from_application) == wire.Hello(engines=(E0,))
            line.says(wire.Welcome(job=JOB, node=NODE))
            return line

        with ThreadPoolExecutor() as pool:
            met = pool.submit(meet)
            with threads:
                line = met.result()
                line.says(wire.Withdrawn(engine=E0, incarnation=1, number=7))
                lost = line.hears(wire.from_application)
                assert isinstance(lost, wire.LaunchFailed) and lost.number == 7
                line.says(launch(8))
                first = line.hears(wire.from_application)
                assert isinstance(first, wire.Launched) and (first.number, asked) == (8, [1])
                line.says(wire.Withdrawn(engine=E0, incarnation=1, number=8))
                assert line.hears(wire.from_application) == first, "its answer may have been lost"
                line.close()
                line = meet()
                assert line.hears(wire.from_application) == first
                line.says(launch(9))
                again = line.hears(wire.from_application)
                assert isinstance(again, wire.Launched) and (again.number, asked) == (9, [1, 1])
                line.close()


async def test_an_answer_to_an_earlier_launch_of_the_incarnation_is_not_that_of_the_present_one(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", delegated(stub_model))

    def fills() -> Line:
        with wire.door(file.state_path) as path:
            channel = socket.socket(socket.AF_UNIX)
            channel.connect(path)
        line = Line(channel)
        line.says(wire.Hello(engines=(E0,)))
        assert isinstance(line.hears(wire.from_agent), wire.Welcome)
        return line

    def answers(line: Line) -> None:
        launch = line.hears(wire.from_agent)
        assert isinstance(launch, wire.Launch)
        failed = wire.LaunchFailed(engine=E0, incarnation=1, number=launch.number - 1, detail="long ago")
        line.says(failed)
        line.says(msgspec.structs.replace(failed, number=launch.number, detail="just now"))

    async with directing(file, server.url) as player:
        line = await anyio.to_thread.run_sync(fills)
        try:
            await player.decide(player.start())
            await anyio.to_thread.run_sync(answers, line)
            failed = await player.wait(StartFailed)
            assert "just now" in failed.detail
        finally:
            line.close()
