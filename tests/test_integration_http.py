"""A trainer that knows engines by HTTP and relight by three calls: `trainer`, `wait` and `sync`."""

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import relight
from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.embedded import Embedded
from relight.events.decisions import RecoveryFinished, RouteAdded
from tests.integration_rig import gateway, posted, running, stub
from tests.node_support import E0, JOB, kill, node_file, role
from tests.orchestrator_support import until
from tests.weights_rig import arrays, job

pytestmark = pytest.mark.anyio

STEPS, TOKENS = 3, 60
PROMPT = [5, 6, 7]


def train(url: str, server: str, snapshots: Path, weights: dict[str, Any]) -> list[list[int]]:
    """The whole trainer: what its rollouts gave."""
    with relight.trainer(url, job=JOB, sync=relight.SnapshotSync(weights, snapshots, keep=10)) as trainer:

        def rollout() -> list[int]:
            asked = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
            answer = posted(server, "/v1/completions", {**asked, "return_token_ids": True})
            found: list[int] = answer["choices"][0]["token_ids"]
            return found

        told = []
        trainer.sync(0)
        for step in range(STEPS):
            told.append(trainer.wait(rollout))
            for name in weights:
                weights[name] += np.float32(0.5)
            trainer.sync(step + 1)
        return told


async def test_three_calls_carry_it_over_the_death_of_its_only_engine(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    engine = stub(stub_model, "--token-interval-ms", "10", "--served-model-name", "m")
    file = node_file(tmp_path / "state", engine)
    weights = arrays(tmp_path / "start", seed=1)
    told: list[list[int]] = []
    async with job(server.url, file) as watch, gateway(server.url) as address:
        async with anyio.create_task_group() as tasks:

            async def trained() -> None:
                told.extend(
                    await anyio.to_thread.run_sync(train, server.url, address, tmp_path / "weights", weights)
                )

            tasks.start_soon(trained)
            route = await watch.routed(E0, 1, step=1)
            await until(lambda: running(route.address))
            kill(role(file, "core"))
        assert [done.outcome for done in watch.all(RecoveryFinished)] == ["done"]
        run = watch.all(RouteAdded)[-1].version.run
    expected = [
        reference(weights_digest(tmp_path / "weights" / f"{run}.{step}"), PROMPT, TOKENS)[0]
        for step in range(STEPS)
    ]
    assert told == expected
    assert len({tuple(each) for each in expected}) == STEPS, "each step's weights say something else"
