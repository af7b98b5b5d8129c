"""Many lives of engines, ended at random: nothing is left of any, and nobody else is ever hit.

Twelve of them here; with LONG=1 in the environment, a hundred.
"""

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from relight.agents.node import marks, proc
from relight.agents.node.config import NodeFile
from relight.events.bus.embedded import Embedded
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, Healthy, NodeUp, StartFailed
from relight.events.ids import EngineName
from relight.events.values import Process
from relight.events.version import BASE
from tests.node_support import (
    Player,
    alive,
    directing,
    engine,
    generating,
    kill,
    node_file,
    record,
    role,
)

LONG = os.environ.get("LONG") == "1"
ROUNDS = 34 if LONG else 4
NAMES = [EngineName(f"e{index}") for index in range(3)]
ENDS = ("leader", "core", "worker", "freeze", "stop", "stop in its start", "killed in its start")
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1200 if LONG else 120)]


@contextmanager
def bystanders(file: NodeFile) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes of this user that look like an engine's in every way but the one that counts."""
    slot = marks.slot_id(file.job, state_dir=file.state_path)
    tag = marks.tag_of(slot, NAMES[0], 1)
    plain = ["sleep", "600"]
    started = [
        subprocess.Popen(plain),
        subprocess.Popen(plain, start_new_session=True),
        subprocess.Popen(["sh", "-c", "sleep 600 & wait", f"{tag}::EngineCore"]),
        subprocess.Popen(plain, env={**os.environ, marks.TAG: f"another.{tag}"}),
        subprocess.Popen(["python3", "-c", "import time; time.sleep(600)", "VLLM::EngineCore"]),
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


async def _begun(file: NodeFile, name: EngineName, incarnation: int) -> Process:
    """The first process of a start that is under way."""
    with anyio.fail_after(15):
        while True:
            with contextlib.suppress(FileNotFoundError):
                known = record(file, name)
                if known.incarnation == incarnation and known.leader is not None:
                    return known.leader
            await anyio.sleep(0.01)


async def _live(player: Player, file: NodeFile, name: EngineName, incarnation: int, end: str) -> None:
    """One life of one engine, and its end."""
    order = player.start(incarnation, engine=name)
    await player.decide(order)
    if end in ("stop in its start", "killed in its start"):
        leader = await _begun(file, name, incarnation)
        if end == "killed in its start":
            kill(leader)
            failed = await player.wait(StartFailed, lambda fact: fact.engine == name)
            assert failed.incarnation == incarnation and leader in failed.proof.processes
    else:
        await player.wait(EngineStarted, lambda fact: fact.engine == name)
        if end == "freeze":
            await player.ask(Healthy, player.verify(BASE, incarnation, engine=name))
            os.kill(role(file, "core", name).pid, 19)
        if end != "stop":
            if end != "freeze":
                kill(role(file, end, name))
            dead = await player.wait(EngineDead, lambda fact: fact.engine == name)
            assert dead.incarnation == incarnation
    known = {member.process for member in record(file, name).members}
    stopped = await player.ask(EngineStopped, player.stop(incarnation, engine=name))
    assert known <= set(stopped.proof.processes) and stopped.proof.processes
    assert not any(map(alive, stopped.proof.processes))


def _zombies() -> set[Process]:
    """Children of this process that ended and that nobody has reaped."""
    stats = proc.all_stats().values()
    return {stat.process for stat in stats if stat.state == "Z" and stat.ppid == os.getpid()}


async def test_random_lives_leave_nothing_and_hit_nobody(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    chance = random.Random(7)
    engines = (engine(stub_model, name=name, grace_s=2.0, stall_s=0.5) for name in NAMES)
    file = node_file(tmp_path / "state", *engines)
    tmpdirs: set[str] = set()
    segments: set[str] = set()
    descriptors: list[int] = []
    before = _zombies()
    async with directing(file, server.url) as player:
        with bystanders(file) as others:
            ends = [end for end in ENDS for _ in range(2)][: 3 * ROUNDS] if not LONG else []
            chance.shuffle(ends)
            for incarnation in range(1, ROUNDS + 1):
                for name in NAMES:
                    await _live(player, file, name, incarnation, ends.pop() if ends else chance.choice(ENDS))
                    tmpdirs.add(record(file, name).tmpdir)
                    segments |= {segment.path for segment in record(file, name).segments}
                descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
            assert [process.poll() for process in others] == [None] * len(others)
        slot = marks.slot_id(file.job, state_dir=file.state_path)
        assert not any(marks.family(slot, name) for name in NAMES)
        with anyio.fail_after(5):  # the log pumps end by themselves
            while _zombies() - before:
                await anyio.sleep(0.02)
    assert len(tmpdirs) == 3 * ROUNDS and segments
    assert not any(Path(path).exists() for path in tmpdirs | segments)
    deaths = [(dead.engine, dead.incarnation) for dead in player.seen(EngineDead)]
    assert len(deaths) == len(set(deaths))
    assert descriptors[-1] <= descriptors[0] + 3, f"descriptors grow: {descriptors}"


async def test_an_adoption_under_load_breaks_no_call(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    import aiohttp

    from relight.agents.stub.tokens import reference, weights_digest
    from tests.node_support import agent_process, playing, running, swept

    file = node_file(tmp_path / "state", engine(stub_model, "--max-model-len", "2048", stall_s=1.0))
    prompts = [[index + 1, 7, 11] for index in range(8)]
    with swept(file):
        async with playing(server.url) as player:
            answers: dict[int, list[int]] = {}

            async def call(started: EngineStarted, index: int) -> None:
                body = {"token_ids": prompts[index], "stream": False,
                        "sampling_params": {"max_tokens": 900, "temperature": 0.0}}  # fmt: skip
                url = started.address + "/inference/v1/generate"
                async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
                    answers[index] = (await answer.json())["choices"][0]["token_ids"]

            async with anyio.create_task_group() as calls:
                with agent_process(file, server.url, tmp_path / "node.json") as first:
                    await player.wait(NodeUp)
                    started = await player.ask(EngineStarted, player.start())
                    await player.ask(Healthy, player.verify(BASE))
                    for index in range(len(prompts)):
                        calls.start_soon(call, started, index)
                    assert first.poll() is None
                async with running(file, server.url, stop_engines=False):
                    up = await player.wait(NodeUp)
                    assert [(each.state, each.incarnation) for each in up.engines] == [("up", 1)]
                    assert not answers, "the calls outlast the adoption"
                    async with generating(started, tokens=10):
                        with pytest.raises(TimeoutError):
                            await player.wait(EngineDead, within_s=1.5)
            digest = weights_digest(stub_model)
            for index, prompt in enumerate(prompts):
                assert answers[index] == reference(digest, prompt, 900)[0]
