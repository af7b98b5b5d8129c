"""A verl 0.9.1 job under relight: verl's replicas and trainer loop, Ray, agent, orchestrator; a stub engine.

One job for the whole module: a verl process needs ten seconds for its imports, and it has a dozen.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest

from relight.agents.adapters import vllm
from relight.agents.node import proc
from relight.agents.node.config import load
from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import embedded
from relight.events.bus.follow import reached
from relight.events.decisions import BoundaryReleased, SyncWeights
from relight.events.ids import EngineName
from relight.events.values import Phase, Process
from relight.orchestrator import service
from relight.orchestrator.settings import Settings, SettingsFile
from tests.conftest import write_model
from tests.node_support import JOB, kill, running, swept
from tests.verl_named import named
from tests.weights_rig import Watch

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed (see docs/verl.md)"),
    pytest.mark.long,
    pytest.mark.timeout(500),
]
ANSWER_S = 180.0
PROMPT = [5, 6, 7]


class Verl:
    """The job's process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("ab") as log:
            while line := await self._process.stdout.readline():
                log.write(line)
                log.flush()
                if line.startswith(b"> "):
                    number, value = json.loads(line[2:])
                    self._answers[number].set_result(value)

    def ask(self, name: str, argument: object = None) -> "asyncio.Future[Any]":
        assert self._process.stdin is not None
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps([self._number, name, argument]).encode() + b"\n")
        return answer

    async def __call__(self, name: str, argument: object = None) -> Any:
        value = await asyncio.wait_for(self.ask(name, argument), ANSWER_S)
        assert not (isinstance(value, dict) and "error" in value), value["error"]
        return value


@asynccontextmanager
async def verl(folder: Path, model: Path, overrides: list[str]) -> AsyncIterator[Verl]:
    (folder / "overrides.json").write_text(json.dumps(overrides))
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}:{root}:{named(folder / 'named')}",
        "RELIGHT_TEST_STUB": str(model),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
    }
    with (folder / "verl.err").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(root / "tests/verl_job.py"), str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            limit=1 << 22,
        )
    one = Verl(process, folder / "verl.out")
    reading = asyncio.create_task(one.read())
    try:
        yield one
    except BaseException:
        for name in ("verl.err", "verl.out"):
            print(f"--- {name}", *(folder / name).read_text().splitlines()[-60:], sep="\n")
        raise
    finally:
        with anyio.CancelScope(shield=True):
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 60)
            except TimeoutError:
                process.kill()
                await process.wait()
            await reading


OVERRIDES = [
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.response_length=400",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=folder",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tests.verl_rig",
    "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.folder.rebuild_group=True",
]
NAMES = (EngineName("e0"), EngineName("e1"))


class Patient(Watch):
    """For a job whose actors take seconds to come on a busy machine."""

    async def until(self, kind: Any, where: Any = lambda _: True) -> Any:
        for _ in range(3):
            try:
                return await super().until(kind, where)
            except AssertionError as late:
                error = late
        raise error


@asynccontextmanager
async def relight_job(url: str, folder: Path) -> AsyncIterator[Watch]:
    """Orchestrator and agent of two slots that a verl job is to fill."""
    toml = f"""job = "{JOB}"\nnode = "node-a"\nstate_dir = "{folder / "state"}"\n"""
    for name in NAMES:
        toml += f"""\n[[engines]]\nname = "{name}"\nlauncher = "delegated"\n"""
        toml += """command = ["--load-format", "dummy"]\n"""
    (folder / "node.toml").write_text(toml)
    (folder / "router.yaml").write_text(
        "router_class: relight.agents.adapters.verl.LoadBalancer\n"
        f"job: {JOB}\nbus: {url}\nnode_file: {folder / 'node.toml'}\nwait_s: 120\n"
    )
    file = load(folder / "node.toml")

    async def orchestrate() -> None:
        await service.serve(bus_url=url, jobs=[JOB], settings=SettingsFile(Settings(backoff_s=0), {}))

    async with open_bus(url) as bus, anyio.create_task_group() as tasks:
        watch = Patient(bus.job(JOB))
        tasks.start_soon(watch.run)
        tasks.start_soon(orchestrate)
        with swept(file):
            async with running(file, url):
                yield watch
        tasks.cancel_scope.cancel()


async def process_of(watch: Watch, engine: str, title: str) -> Process:
    """The one of the engine's processes whose title or command line has this word."""
    state = (await reached(watch.job, within_s=ANSWER_S)).engines[EngineName(engine)]
    return next(one for one in state.processes if title in proc.command_line(one.pid))


async def under_way(verl: Verl, engine: str, within_s: float = ANSWER_S) -> str:
    """The id of the engine's server, once a call is under way there."""
    with anyio.fail_after(within_s):
        while True:
            servers = (await verl("balancer", ["get_status"]))["servers"]
            for name, calls in servers.items():
                if name.startswith(engine) and calls:
                    return str(name)


def members(sync: SyncWeights) -> set[tuple[str, int]]:
    return {(member.engine, member.incarnation) for member in sync.members}


async def test_a_verl_job_goes_on_through_the_deaths_of_its_engines() -> None:
    """v1 `separate_async` with two optimizer steps a sync; deaths while it waits for samples."""
    with tempfile.TemporaryDirectory(prefix="rv-") as name:  # Ray's sockets need a short path
        folder = Path(name)
        model = write_model(folder / "model", seed=99)
        router = f"actor_rollout_ref.rollout.router_config_path={folder / 'router.yaml'}"
        with embedded(folder / "bus") as server:
            async with verl(folder, model, [*OVERRIDES, router]) as job:
                taken = await job("taken")
                async with relight_job(server.url, folder) as watch:
                    assert taken["verl"] == "0.9.1"
                    assert {taken["trainer"], taken["manager"], taken["replica"]} == {
                        f"relight.agents.adapters.verl.{each}" for each in ("trainers", "clients", "replica")
                    }
                    lives = await _begins(job, watch)
                    run = await job("trainer_begins")
                    await _recovers(job, watch, folder, (run, lives))
                    await _plain_client(job, watch, folder)
                    assert await job("finish")


async def _begins(job: Verl, watch: Watch) -> dict[str, int]:
    """Its replicas fill the node's slots, and its balancer gives out what is routed. The incarnations are
    the first ones that found verl there to start them."""
    begun = await job("begin")
    lives = {each["engine"]: each["incarnation"] for each in begun["replicas"]}
    assert set(lives) == set(NAMES)
    e0, e1 = (f"{name}.{lives[name]}" for name in NAMES)
    for name in NAMES:
        await watch.routed(name, lives[name])
    first, _ = await job("balancer", ["acquire_server", "s1"])
    again, _ = await job("balancer", ["acquire_server", "s1"])
    other, _ = await job("balancer", ["acquire_server", "s2"])
    assert first == again != other and {first, other} == {e0, e1}
    assert await job("balancer", ["get_total_inflight"]) == 3
    for name in (first, again, other, "e0.99"):
        await job("balancer", ["release_server", name])
    assert (await job("balancer", ["clear_sticky_cache"]))["cleared_entries"] == 2
    await job("balancer", ["remove_servers", [e0]])
    assert await job("balancer", ["get_all_servers"]) == [e1]
    for how in ("init_hybrid", "init_colocated"):
        assert "separate_async" in await job("refused", how)
    return lives


async def _recovers(job: Verl, watch: Watch, folder: Path, began: tuple[int, dict[str, int]]) -> None:
    run, lives = began
    n0, n1 = lives["e0"], lives["e1"]
    for name in NAMES:
        await watch.routed(name, lives[name], step=0)
    before = await job("seen")
    training = job.ask("train", 1)
    await job("sampling")

    at_rest = await tokens_made(watch, "e1")
    # e0 was taken out by verl, so the turn goes to e1, whose core is killed under it.
    turn = job.ask("generate", ["fully", PROMPT, 150])
    assert await under_way(job, "e1") == f"e1.{n1}"
    with anyio.fail_after(ANSWER_S):
        while await tokens_made(watch, "e1") < at_rest + 30:
            pass
    kill(await process_of(watch, "e1", "EngineCore"))
    await watch.routed(NAMES[1], n1 + 1, step=0)
    recovery = watch.all(SyncWeights)[-1]
    assert members(recovery) == {("e1", n1 + 1)} and (recovery.version.run, recovery.version.step) == (run, 0)
    answer = await asyncio.wait_for(turn, ANSWER_S)
    whole = reference_tokens(folder, seed=0, count=150)
    assert answer["token_ids"] == whole and len(answer["log_probs"]) == 150
    asked_for = await tokens_of_the_turn(watch, "e1")
    assert asked_for < 150 - 20, "it went on behind the tokens that there were"

    after = await job("seen")
    assert after["placement_groups"] == before["placement_groups"]
    assert {each["engine"]: each["incarnation"] for each in after["replicas"]} == {"e0": n0, "e1": n1 + 1}
    workers = [{each["engine"]: each["workers"] for each in seen["replicas"]} for seen in (before, after)]
    assert workers[0] == workers[1], "the bundles are held by the workers that verl made"
    aborted = [{each["engine"]: each["aborted"] for each in seen["replicas"]} for seen in (before, after)]
    assert aborted[0]["e0"] == aborted[1]["e0"], "a healthy engine is not paused for another one's recovery"
    assert (await job("groups"))[-2:] == [3, 2], "all of them, then the trainer and the stale replica alone"

    # Behind the first of two optimizer steps the live weights are of no version: the next death waits.
    await job("sampled")
    await job("sampling")
    syncs = len(watch.all(SyncWeights))
    kill(await process_of(watch, "e0", "StubServer"))
    await seen_started(watch, "e0", n0 + 1)
    assert len(watch.all(SyncWeights)) == syncs
    await job("sampled")
    assert await asyncio.wait_for(training, ANSWER_S) == 1
    full = watch.all(SyncWeights)[-1]
    assert members(full) == {("e0", n0 + 1), ("e1", n1 + 1)} and full.version.step == 1
    for name in NAMES:
        await watch.routed(name, lives[name] + 1, step=1)
    assert watch.all(BoundaryReleased)[-1].outcome == "done"


async def tokens_made(watch: Watch, engine: str) -> int:
    """By the incarnation that is routed, its proofs included."""
    return int(vllm.total(await exposition(watch, engine), "generation_tokens_total") or 0)


async def tokens_of_the_turn(watch: Watch, engine: str) -> int:
    """By the routed incarnation, which ended one turn; its other requests are proofs, of one token each."""
    told = await exposition(watch, engine)
    made, ended = (vllm.total(told, name) for name in ("generation_tokens_total", "request_success_total"))
    assert made and ended
    return int(made - (ended - 1))


async def exposition(watch: Watch, engine: str) -> bytes:
    state = (await reached(watch.job, within_s=ANSWER_S)).engines[EngineName(engine)]
    async with vllm.session() as http:
        return await vllm.Client(http, state.address or "").exposition(within_s=ANSWER_S)


async def seen_started(watch: Watch, engine: str, incarnation: int) -> None:
    """Return once the incarnation is up and waits for its weights."""
    with anyio.fail_after(ANSWER_S):
        while True:
            state = (await reached(watch.job, within_s=ANSWER_S)).engines[EngineName(engine)]
            if (state.incarnation, state.phase) == (incarnation, Phase.STALE):
                return


async def _plain_client(job: Verl, watch: Watch, folder: Path) -> None:
    """verl's plain client does not resume: the whole turn is done again."""
    turn = job.ask("generate", ["plain", PROMPT, 100])
    engine = (await under_way(job, "e")).partition(".")[0]
    kill(await process_of(watch, engine, "StubServer"))
    answer = await asyncio.wait_for(turn, ANSWER_S)
    assert answer["stop_reason"] == "completed"
    assert answer["token_ids"] == reference_tokens(folder, seed=2, count=100)
    assert "relight_engine_died" not in answer["extra_fields"]


def reference_tokens(folder: Path, *, seed: int, count: int) -> list[int]:
    """What the weights of that many optimizer steps generate."""
    weights = folder / f"seed-{seed}"
    if not weights.exists():
        write_model(weights, seed=seed)
    return list(reference(weights_digest(weights), PROMPT, count)[0])
