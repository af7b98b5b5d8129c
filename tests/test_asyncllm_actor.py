"""AsyncLLM in the application's own Ray actor, all of it real: the core is killed, then the actor itself."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, Fact, StartFailed
from relight.events.ids import BEGINNING, JobName
from relight.orchestrator.cli.demo import model
from relight.orchestrator.cli.demo.layout import RELIGHT, command_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(420),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.long,
]
JOB = JobName("asyncllm")
APP = "tests.asyncllm_app"
"""Its own process: Ray's and vLLM's warnings are not errors there."""
PAGE = Path(__file__).parent.parent / "docs" / "asyncllm.md"


@pytest.fixture
def ray_dir() -> Iterator[str]:
    """A short path: Ray puts sockets below it."""
    folder = tempfile.mkdtemp(prefix="r-")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(*command: str, log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        process.wait(120)


async def facts(url: str) -> list[Fact]:
    async with open_bus(url) as bus:
        entries = await bus.job(JOB).read_facts(BEGINNING, count=10_000)
        return [codec.decode_fact(entry) for entry in entries]


def ray_processes(folder: str) -> list[int]:
    """Those of the cluster that has its files there."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and folder.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


async def test_a_turn_goes_on_in_the_next_actor_after_its_core_and_then_its_actor_was_killed(
    server: Embedded, tmp_path: Path, ray_dir: str
) -> None:
    model.make("vllm", tmp_path / "model")
    write_node_file(tmp_path)
    bus = ("--bus", server.url)
    decide = (*RELIGHT, "orchestrate", *bus, "--job", JOB)
    own = (*RELIGHT, "agent", *bus, "--config", str(tmp_path / "node.toml"), "--stop-engines")
    places = (str(tmp_path / "node"), ray_dir, str(tmp_path / "model"))
    with running(*own, log=tmp_path / "agent.log"):
        with (tmp_path / "app.log").open("wb") as log:
            app = subprocess.Popen(
                [sys.executable, "-m", APP, server.url, JOB, *places],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            assert app.stdout is not None
            await anyio.to_thread.run_sync(app.stdout.readline)  # it is there before it is asked
            with running(*decide, log=tmp_path / "orchestrator.log"):
                out, _ = await anyio.to_thread.run_sync(app.communicate)
        finally:
            app.kill()
        told = await facts(server.url)
    if app.returncode != 0:
        pytest.fail(f"{(tmp_path / 'app.log').read_text()[-6000:]}\n{told}", pytrace=False)
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert_the_callers_saw_it(report)
    assert_it_was_proven_gone(report, told)
    assert not ray_processes(ray_dir)


async def test_the_example_of_the_page_runs_as_it_stands(
    server: Embedded, tmp_path: Path, ray_dir: str
) -> None:
    """But for its paths, and for a machine without a GPU."""
    model.make("vllm", tmp_path / "model")
    write_node_file(tmp_path)
    [text] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    own = {
        "ray.init()": f"ray.init(num_cpus=2, include_dashboard=False, _temp_dir={ray_dir!r},"
        " object_store_memory=100 * 1024 * 1024)",
        '"CPU": 8, "GPU": 1': '"CPU": 1',
        ", num_gpus=1": "",
        "/var/lib/relight": str(tmp_path / "node"),
        "node-a-0": "e0",
        "grpo-1": JOB,
    }
    for word, here in own.items():
        assert word in text
        text = text.replace(word, here)
    (tmp_path / "example.py").write_text(text)
    bus = ("--bus", server.url)
    decide = (*RELIGHT, "orchestrate", *bus, "--job", JOB)
    agent = (*RELIGHT, "agent", *bus, "--config", str(tmp_path / "node.toml"), "--stop-engines")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    with running(*agent, log=tmp_path / "agent.log"), running(*decide, log=tmp_path / "orchestrator.log"):
        done = await anyio.run_process(
            [sys.executable, tmp_path / "example.py"],
            env={**environment, "RELIGHT_BUS_URL": server.url},
            check=False,
        )
    assert done.returncode == 0, f"{done.stderr.decode()[-6000:]}\n{(tmp_path / 'agent.log').read_text()}"
    lines = done.stdout.decode().splitlines()
    assert [line for line in lines if line.startswith("tokens [")]
    assert [line for line in lines if re.match(r"incarnation \d+ \{", line)]


def write_node_file(folder: Path) -> None:
    command, env = command_of("vllm")
    table = "\n".join(
        f"{key} = {json.dumps(value)}" for key, value in {**env, "OMP_NUM_THREADS": "1"}.items()
    )
    (folder / "node.toml").write_text(
        f'job = "{JOB}"\nnode = "node-a"\nhost = "127.0.0.1"\nstate_dir = "{folder}/node"\n'
        f'[[engines]]\nname = "e0"\nlauncher = "delegated"\nmodel = "{folder}/model"\n'
        f'cache_dir = "{folder}/cache"\ncommand = {json.dumps(command)}\n[engines.env]\n{table}\n'
    )


def assert_the_callers_saw_it(report: dict[str, Any]) -> None:
    """EngineDeadError and ActorDiedError are told apart; the turn is the uninterrupted one to the token.

    A dead core's actor is stopped within milliseconds, and the fence is as fast as its error.
    """
    assert report["direct"]["loss"] in ("engine", "actor") and report["direct"]["made"] >= 24
    assert report["orphaned"]["loss"] == "actor" and report["orphaned"]["made"] >= 24
    turn = report["turn"]
    assert turn["token_ids"] == report["reference"]
    assert turn["logprobs"] == len(turn["token_ids"]) and turn["finish"] == "length"
    first, *between, last = turn["attempts"]
    assert first[:2] == ["e0", 1] and first[3] in ("error_frame", "fenced")
    assert first[3] == "fenced" or first[4].startswith(("engine: ", "actor: ")), first
    assert last[:2] == ["e0", report["incarnation"]] and last[2] >= 24, "it went on from the partial"
    assert not between
    assert report["incarnation"] == 2 and report["named"]
    assert report["first"]["placement_group"] == report["second"]["placement_group"] == report["group"]
    assert report["first"]["pid"] != report["second"]["pid"]
    assert report["paused"] and report["updated"] == report["reference"]


def assert_it_was_proven_gone(report: dict[str, Any], told: list[Fact]) -> None:
    """Core, worker, actor and listener, each time before the next one was begun."""
    dead = [fact for fact in told if isinstance(fact, EngineDead)]
    stopped = {fact.incarnation: fact for fact in told if isinstance(fact, EngineStopped)}
    started = {fact.incarnation: fact for fact in told if isinstance(fact, EngineStarted)}
    assert not [fact for fact in told if isinstance(fact, StartFailed) and fact.incarnation < 3]
    assert [(fact.incarnation, fact.cause, fact.signal) for fact in dead[:2]] == [
        (1, "signal", signal.SIGKILL),
        (2, "signal", signal.SIGKILL),
    ]
    for each, incarnation in (("first", 1), ("second", 2)):
        proof = stopped[incarnation].proof
        pids = {process.pid for process in proof.processes}
        assert report[each]["pid"] in pids and len(pids) >= 3 and proof.port_free
        assert set(started[incarnation].processes) <= set(proof.processes)
    due = [dead[0], stopped[1], started[2]]
    assert [fact for fact in told if fact in due] == due
