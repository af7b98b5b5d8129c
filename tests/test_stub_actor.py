"""relight's Ray actor with a stub in the place of AsyncLLM: its start, its ends and what they come to."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from relight.agents.node.config import Engine
from relight.agents.stub.tokens import reference, weights_digest
from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, Fact
from relight.events.ids import BEGINNING, EngineName
from relight.orchestrator.settings import Settings
from tests.node_support import JOB, node_file, running, swept
from tests.orchestrator_support import orchestrating

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
APP = "tests.stub_actor_app"
"""Its own process: Ray's warnings are not errors there."""


@pytest.fixture
def ray_dir() -> Iterator[str]:
    """A short path: Ray puts sockets below it."""
    folder = tempfile.mkdtemp(prefix="r-")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


async def test_an_actor_that_is_killed_is_followed_by_another_one_in_the_same_bundle(
    server: Embedded, tmp_path: Path, stub_model: Path, ray_dir: str
) -> None:
    flags = ("--model", str(stub_model), "--host", "127.0.0.1", "--port", "{port}")
    slot = Engine(
        name=EngineName("e0"), launcher="delegated", model=str(stub_model), command=("vllm", "serve", *flags)
    )
    file = node_file(tmp_path / "state", slot)
    asked = tmp_path / "shut-down"
    words = [sys.executable, "-m", APP, server.url, JOB, file.state_dir, ray_dir]
    with swept(file):
        async with running(file, server.url):
            with (tmp_path / "app.log").open("wb") as log:
                app = subprocess.Popen(
                    words,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "RELIGHT_TEST_SHUT_DOWN": str(asked)},
                )
            try:
                assert app.stdout is not None
                await anyio.to_thread.run_sync(app.stdout.readline)  # it is there before it is asked
                async with orchestrating(server.url, jobs=(JOB,), settings=Settings(backoff_s=0)):
                    out, _ = await anyio.to_thread.run_sync(app.communicate)
            finally:
                app.kill()
                app.wait()
        told = await facts(server.url)
    if app.returncode != 0:
        pytest.fail(f"{(tmp_path / 'app.log').read_text()[-6000:]}\n{told}", pytrace=False)
    report: dict[str, Any] = json.loads(next(line for line in out.splitlines() if line.startswith(b'{"')))
    assert_the_callers_saw_it(report, stub_model)
    assert asked.exists(), "`shutdown` ends the engine, and not only its actor"
    assert_it_was_proven_gone(report, told)


async def facts(url: str) -> list[Fact]:
    async with open_bus(url) as bus:
        entries = await bus.job(JOB).read_facts(BEGINNING, count=10_000)
        return [codec.decode_fact(entry) for entry in entries]


def assert_the_callers_saw_it(report: dict[str, Any], model: Path) -> None:
    whole = list(reference(weights_digest(model), [5, 6, 7], 200)[0])
    assert report["reference"] == whole and report["paused"] and report["tag"]
    assert report["direct"] == ["ActorDiedError", "actor"]
    assert len(report["had"]) >= 24 and report["had"] == whole[: len(report["had"])]
    assert report["turn"] == whole
    first, last = report["attempts"]
    assert first[0] == 1 and first[2] in ("reset", "fenced")
    assert last[0] == 2 and last[1] >= 24, "it went on behind what there was"
    assert report["incarnations"] == [1, 2] and report["named"]
    assert report["first"]["placement_group"] == report["second"]["placement_group"] == report["group"]
    assert report["first"]["pid"] != report["second"]["pid"]
    assert report["ended"] == "actor" and report["again"] == [whole, 3]


def assert_it_was_proven_gone(report: dict[str, Any], told: list[Fact]) -> None:
    """Actor and stub, each time before the next one was begun: by SIGKILL, and by `shutdown`."""
    dead = {fact.incarnation: fact for fact in told if isinstance(fact, EngineDead)}
    stopped = {fact.incarnation: fact for fact in told if isinstance(fact, EngineStopped)}
    begun = {fact.incarnation: fact for fact in told if isinstance(fact, EngineStarted)}
    assert (dead[1].cause, dead[1].signal) == ("signal", 9)
    for each, number in (("first", 1), ("second", 2)):
        registered = begun[number].processes
        assert registered[0].pid == report[each]["pid"] and len(registered) >= 3, "the actor and the stub"
        proof = stopped[number].proof
        assert set(registered) <= set(proof.processes) and proof.port_free
        due = [begun[number], dead[number], stopped[number], begun[number + 1]]
        assert [fact for fact in told if fact in due] == due
