"""prime-rl with weights over the file system: its calls, in its order, at one address for all engines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from relight.agents.adapters import prime_rl
from relight.agents.adapters.prime_rl import routes_of
from relight.agents.snapshot import MANIFEST
from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.embedded import Embedded
from relight.events.decisions import RouteAdded
from relight.events.ids import EngineName
from relight.events.version import Version
from tests.conftest import write_model
from tests.integration_rig import asked, gateway, running, stub
from tests.node_support import E0, JOB, kill, node_file, role
from tests.orchestrator_support import until
from tests.weights_rig import job

pytestmark = pytest.mark.anyio

E1 = EngineName("e1")
TOKENS = 60


@asynccontextmanager
async def admin(url: str) -> AsyncIterator[str]:
    async with anyio.create_task_group() as tasks:

        async def run(*, task_status: Any) -> None:
            await prime_rl.serve(url, job=JOB, port=0, task_status=task_status)

        yield f"http://127.0.0.1:{await tasks.start(run)}"
        tasks.cancel_scope.cancel()


def broadcast(folder: Path, step: int) -> Path:
    """A step's weights as prime-rl's trainer leaves them: a checkpoint, and then STABLE."""
    written = write_model(folder / "broadcasts" / f"step_{step}", seed=step)
    (written / "STABLE").touch()
    return written


async def update(address: str, directory: Path, *, status: int = 200) -> Any:
    """What prime-rl's orchestrator does when it finds STABLE; what its call is answered."""
    await asked(f"{address}/pause?mode=keep&clear_cache=false", {})
    try:
        return await asked(f"{address}/update_weights", {"weight_dir": directory.as_posix()}, status=status)
    finally:
        await asked(f"{address}/resume", {})


async def updated(address: str, directory: Path) -> Version:
    """The version that is told to be with the engines."""
    return Version.parse((await update(address, directory))["version"])


async def generate(address: str) -> list[int]:
    sampling = {"max_tokens": TOKENS, "temperature": 0.0}
    answer = await asked(
        f"{address}/inference/v1/generate",
        {"token_ids": [1, 2], "sampling_params": sampling, "stream": False},
    )
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def test_a_replacement_has_the_weights_of_the_last_broadcast(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    knobs = ("--token-interval-ms", "10")
    engines = [stub(stub_model, *knobs, name=name) for name in (E0, E1)]
    file = node_file(tmp_path / "state", *engines)
    async with (
        job(server.url, file) as watch,
        gateway(server.url) as rollouts,
        admin(server.url) as address,
    ):
        await asked(f"{address}/health")
        assert await generate(rollouts) == reference(weights_digest(stub_model), [1, 2], TOKENS)[0]
        for step in (1, 2):
            directory = broadcast(tmp_path, step)
            await update(address, directory)
            expected = reference(weights_digest(directory), [1, 2], TOKENS)[0]
            assert [await generate(rollouts) for _ in range(2)] == [expected, expected]

        # An engine dies in the middle of a call: the call comes whole, the replacement has step 2.
        told: list[list[int]] = []
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                told.append(await generate(rollouts))

            tasks.start_soon(call)
            tasks.start_soon(call)
            lost = await watch.routed(E0, 1, step=2)
            await until(lambda: running(lost.address))
            kill(role(file, "core", E0))
        assert told == [expected, expected]
        again = await watch.routed(E0, 2, step=2)
        assert await generate(again.address) == expected

        # The next step reaches both, the replacement too.
        third = broadcast(tmp_path, 3)
        await update(address, third)
        assert await generate(again.address) == reference(weights_digest(third), [1, 2], TOKENS)[0]


async def test_a_step_back_is_a_new_run_and_its_weights_are_those_that_serve(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", stub(stub_model))
    async with (
        job(server.url, file),
        gateway(server.url) as rollouts,
        admin(server.url) as address,
    ):

        async def loaded(directory: Path) -> Version:
            version = await updated(address, directory)
            assert await generate(rollouts) == reference(weights_digest(directory), [1, 2], TOKENS)[0]
            return version

        first = [await loaded(broadcast(tmp_path, step)) for step in (1, 2, 3)]
        assert [(version.run, version.step) for version in first] == [
            (first[0].run, step) for step in (1, 2, 3)
        ]

        # To a step that was broadcast, and on from there.
        back = await loaded(tmp_path / "broadcasts" / "step_2")
        assert back.run > first[0].run and back.step == 2
        assert await loaded(tmp_path / "broadcasts" / "step_2") == back  # asked again
        assert await loaded(tmp_path / "broadcasts" / "step_3") == Version(back.run, 3)

        # To the weights of a checkpoint, which are others of the same step.
        checkpoint = write_model(tmp_path / "checkpoints" / "step_3" / "weight", seed=33)
        other = await loaded(checkpoint)
        assert other.run > back.run and other.step == 3

        # A step that is trained once more is written over what was broadcast of it.
        write_model(tmp_path / "broadcasts" / "step_3", seed=34)
        again = tmp_path / "broadcasts" / "step_3"
        said = await update(address, again, status=500)
        assert f"remove its {MANIFEST}" in said["error"]["message"]
        (again / MANIFEST).unlink()
        assert (await loaded(again)).step == 3
        write_model(again, seed=35)
        (again / MANIFEST).unlink()
        assert (await loaded(again)).step == 3


async def test_an_admin_that_is_started_again_publishes_what_an_older_one_did(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", stub(stub_model))
    directory = broadcast(tmp_path, 4)
    async with job(server.url, file) as watch:
        async with admin(server.url) as address:
            first = await updated(address, directory)
        async with admin(server.url) as address:
            again = await updated(address, directory)
            assert again.run > first.run and again.step == 4
            await watch.until(RouteAdded, lambda route: route.version == again)


async def test_a_run_that_another_one_has_overtaken_is_told_so(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", stub(stub_model))
    async with (
        job(server.url, file) as watch,
        admin(server.url) as older,
        admin(server.url) as newer,
    ):
        version = await updated(newer, broadcast(tmp_path, 1))
        said = await update(older, broadcast(tmp_path, 2), status=409)
        assert f"engines are given {version}, not {version.run - 1}.2" in said["error"]["message"]
        [route] = routes_of(await watch.job.snapshot())
        assert route.version == version


async def test_the_start_of_an_orchestrator_waits_for_an_engine_and_finds_its_model(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """The addresses' health, whatever it is, and then once what models they serve, without a time limit."""
    file = node_file(tmp_path / "state", stub(stub_model))
    async with admin(server.url) as address:
        models: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def start_up() -> None:
                await asked(f"{address}/health")
                models.extend(model["id"] for model in (await asked(f"{address}/v1/models"))["data"])

            tasks.start_soon(start_up)
            await anyio.wait_all_tasks_blocked()
            assert models == []
            async with job(server.url, file) as watch:
                [engine] = watch.all(RouteAdded)
                await until(lambda: models)
                served = (await asked(f"{engine.address}/v1/models"))["data"]
        assert models == [model["id"] for model in served]


async def test_what_cannot_work_is_refused_with_the_reason(server: Embedded, tmp_path: Path) -> None:
    async with job(server.url), admin(server.url) as address:
        refusals = {
            "/update_weights": ({"weight_dir": None}, 501, "filesystem"),
            "/init_broadcaster": ({"host": "h", "port": 1}, 501, "holds no replacement"),
            "/load_lora_adapter": ({"lora_name": "a", "lora_path": "/a"}, 501, "not merged"),
        }
        for path, (body, status, why) in refusals.items():
            said = await asked(address + path, body, status=status)
            assert why in said["error"]["message"]
        (tmp_path / "step_4").mkdir()
        said = await asked(f"{address}/update_weights", {"weight_dir": f"{tmp_path}/step_4"}, status=500)
        assert "step_4" in said["error"]["message"]
        said = await asked(f"{address}/update_weights", {"weight_dir": f"{tmp_path}/latest"}, status=400)
        assert "step_N" in said["error"]["message"]
