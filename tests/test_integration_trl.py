"""TRL's AsyncGRPO: the real trainer takes real steps while its engines are killed; nothing is lost or wrong.

What a sample says of each token, its logprob, is what some version computes and no other one does: so it is
known of every trained token which weights sampled it.
"""

import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import pytest
from safetensors.numpy import load_file

from relight.agents.adapters.trl import weight_transfer
from relight.agents.node.config import Engine
from relight.agents.stub.tokens import extend, prefix_of, reference, score, weights_digest
from relight.events.bus.embedded import Embedded
from relight.events.bus.follow import reached
from relight.events.decisions import RecoveryFinished, RouteAdded, RouteFenced
from relight.events.errors import UsageError
from relight.events.version import Version
from relight.orchestrator.cli.demo import model
from tests.integration_rig import asked, counted, gateway, running, stub
from tests.node_support import E0, JOB, kill, node_file, role
from tests.orchestrator_support import until
from tests.test_replay_openai_vllm import add_tokenizer
from tests.weights_rig import Watch, arrays, job

pytestmark = pytest.mark.anyio

TOKENS, WITHIN_S = 40, 500.0
EOS = model.VOCABULARY - 1


class Sample(NamedTuple):
    """What the loss was given."""

    token_ids: list[int]
    first: int
    """The first token that was sampled."""
    logprobs: list[float]
    group: int
    sync: int
    """TRL's count of syncs as the group was begun."""


needs_trl = [
    pytest.mark.timeout(WITHIN_S + 60),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
]


@asynccontextmanager
async def training(plan: dict[str, Any], log: Path) -> AsyncIterator[Callable[[], None]]:
    """TRL's trainer as a process; what is yielded raises where it has ended otherwise than well."""
    command = [sys.executable, "-m", "tests.trl_training", json.dumps(plan)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        async with await anyio.open_process(command, stdout=out, stderr=out, env=environment) as process:

            def ended() -> None:
                assert process.returncode in (None, 0), log.read_text()[-6000:]

            async with anyio.create_task_group() as tasks:

                async def wait() -> None:
                    await process.wait()
                    ended()

                tasks.start_soon(wait)
                try:
                    with anyio.fail_after(WITHIN_S):
                        yield ended
                        await process.wait()
                finally:
                    if process.returncode is None:
                        process.kill()


def samples(path: Path) -> list[Sample]:
    told = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Sample(
            each["input_ids"],
            each["mask"].index(1),
            each["logprobs"],
            each["group"],
            each["version"],
        )
        for each in told
    ]


Scorer = Callable[[Sample], Sequence[float]]
"""The logprob of each token of a sample, from its first sampled one on."""


def of_stub(folder: Path) -> Scorer:
    digest = weights_digest(folder)

    def scored(sample: Sample) -> list[float]:
        found: list[float] = []
        prefix = prefix_of(sample.token_ids[: sample.first])
        for token in sample.token_ids[sample.first :]:
            found.append(score(digest, prefix, token).logprob)
            prefix = extend(prefix, token)
        return found

    return scored


def of_qwen(folder: Path) -> Scorer:
    import torch
    from transformers import Qwen2ForCausalLM

    made: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype="float32")

    def scored(sample: Sample) -> list[float]:
        with torch.no_grad():
            logits = made(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        sampled = range(sample.first, len(sample.token_ids))
        return [float(logits[at - 1, sample.token_ids[at]]) for at in sampled]

    return scored


def sampled_by(sample: Sample, scorers: Sequence[Scorer], *, within: float) -> list[int]:
    """Which weights each sampled token came from; -1 where none say so."""
    scores = list(zip(*(scored(sample) for scored in scorers), strict=True))
    recorded = sample.logprobs[sample.first :]
    found: list[int] = []
    for logprob, of_each in zip(recorded, scores, strict=True):
        nearest = min(range(len(scorers)), key=lambda step: abs(of_each[step] - logprob))
        found.append(nearest if abs(of_each[nearest] - logprob) <= within else -1)
    return found


class Kind(NamedTuple):
    """An engine that TRL trains with, and how its tokens are told apart."""

    engine: Callable[[Path, Path], Engine]
    scorer: Callable[[Path], Scorer]
    within: float
    steps: int
    killed_at: tuple[int, ...]
    """After the sync of each of these steps."""


def stub_engine(models: Path, base: Path) -> Engine:
    """It takes the trained model's tensors, and says of itself that it is no Qwen."""
    base.mkdir()
    (base / "model.safetensors").hardlink_to(models / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "stub"}))
    return stub(base, "--token-interval-ms", "10", "--served-model-name", str(models))


def vllm_engine(models: Path, base: Path) -> Engine:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{weights}"]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--served-model-name", str(models)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--enable-scale-out"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return Engine(name=E0, command=tuple(command), model=str(models), env=env, kv="recompute")


STUB = Kind(stub_engine, of_stub, 1e-6, steps=5, killed_at=(1, 3))
VLLM = Kind(vllm_engine, of_qwen, 2e-3, steps=8, killed_at=(1,))


@pytest.mark.timeout(WITHIN_S + 60)
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize(
    "kind", [STUB, pytest.param(VLLM, marks=[pytest.mark.vllm, pytest.mark.long])], ids=["stub", "vllm"]
)
async def test_it_trains_on_while_its_engine_is_killed(kind: Kind, server: Embedded, tmp_path: Path) -> None:
    model.make("vllm", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    file = node_file(tmp_path / "state", kind.engine(tmp_path / "model", tmp_path / "base"))
    names = {name: str(tmp_path / name) for name in ("snapshots", "model", "output", "samples")}
    async with job(server.url, file) as watch, gateway(server.url) as address:
        plan = {
            **names,
            "bus": server.url,
            "job": JOB,
            "server": address,
            "steps": kind.steps,
            "tokens": TOKENS,
        }
        async with training(plan, tmp_path / "log"):
            for incarnation, step in enumerate(kind.killed_at, start=1):
                route = await routed(watch, incarnation, step)
                await until(in_the_middle_of_calls(route.address), within_s=WITHIN_S)
                kill(role(file, "core"))
        assert await counted(address, "relight_replay_kept_tokens_total") > 0
    run = next(route.version.run for route in watch.all(RouteAdded) if route.version.run)
    versions = [tmp_path / "snapshots" / str(Version(run, step)) for step in range(kind.steps + 1)]
    await anyio.to_thread.run_sync(check, tmp_path, [kind.scorer(each) for each in versions], kind.within)
    assert [done.outcome for done in watch.all(RecoveryFinished)] == ["done"] * len(kind.killed_at)
    handed_over = load_file(versions[-1] / "model.safetensors")
    trained = load_file(tmp_path / "output" / "model.safetensors")
    assert handed_over.keys() == trained.keys()
    assert all((handed_over[name] == trained[name]).all() for name in trained)


def in_the_middle_of_calls(engine: str) -> Callable[[], Awaitable[bool]]:
    """Whether it works on calls that have tokens by now."""
    before: list[float] = []

    async def holds() -> bool:
        sampled = await counted(engine, "vllm:generation_tokens_total")
        before.append(sampled)
        return sampled > before[0] + TOKENS and await running(engine) > 1

    return holds


async def routed(watch: Watch, incarnation: int, step: int) -> RouteAdded:
    """The engine's first route in this incarnation with weights of this step or a later one."""

    def fits(route: RouteAdded) -> bool:
        return route.incarnation == incarnation and route.version.run > 0 and route.version.step >= step

    await until(lambda: watch.all(RouteAdded, fits), within_s=WITHIN_S)
    return watch.all(RouteAdded, fits)[0]


def check(folder: Path, scorers: Sequence[Scorer], within: float) -> None:
    """Every token that the loss was given is some version's, in order, whole, and not stale."""
    trained = samples(folder / "samples")
    assert len(trained) >= 4 * (len(scorers) - 1)  # one batch more may be on its way
    groups = [sample.group for sample in trained]
    assert all(groups.count(group) == 4 for group in groups)
    for sample in trained:
        steps = sampled_by(sample, scorers, within=within)
        assert len(steps) == TOKENS or sample.token_ids[-1] == EOS, "a sample that was cut short"
        assert -1 not in steps, f"tokens that no version says: {steps}"
        assert steps == sorted(steps), f"weights that went back: {steps}"
        assert steps[0] >= sample.sync - 1, f"begun at sync {sample.sync} with weights of {steps[0]}"


# --- the adapter alone -----------------------------------------------------------------------------


def stream(folder: Path, *, seed: int) -> Iterator[tuple[str, Any]]:
    """What TRL streams at a sync."""
    import torch

    for name, array in arrays(folder, seed=seed).items():
        yield name, torch.from_numpy(array)


async def test_a_recovery_between_two_syncs_is_given_what_stands_and_asks_for_no_step(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """Also where recoveries are only served inside a boundary of the trainer."""
    file = node_file(tmp_path / "state", stub(stub_model))
    transfer = weight_transfer(server.url, job=JOB, directory=tmp_path / "w", model=str(stub_model))
    assert transfer is not None
    async with job(server.url, file, recover_at="boundary") as watch:
        call = anyio.to_thread.run_sync
        await call(transfer.init_weight_transfer)
        for step in range(2):
            await call(transfer.pause)
            await call(transfer.send_weights, stream(tmp_path / f"trained-{step}", seed=step + 5))
            await call(transfer.resume)
        kill(role(file, "core"))
        again = await watch.routed(E0, 2, step=1)
        found = await asked(
            f"{again.address}/inference/v1/generate",
            {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "temperature": 0.0}, "stream": False},
        )
        await call(transfer.destroy)
        await call(transfer.destroy)
        await watch.until(RouteFenced, lambda fence: "finished" in fence.reason)
    expected = reference(weights_digest(tmp_path / "trained-1"), [1, 2], 5)[0]
    assert found["choices"][0]["token_ids"] == expected


async def test_a_training_that_fails_does_not_finish_the_job(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    transfer = weight_transfer(server.url, job=JOB, directory=tmp_path / "w", model=str(stub_model))
    assert transfer is not None

    def fails() -> None:
        transfer.init_weight_transfer()
        transfer.send_weights(stream(tmp_path / "trained", seed=5))
        transfer.resume()
        try:
            raise RuntimeError("the loss is not a number")
        finally:
            transfer.destroy()

    async with job(server.url, node_file(tmp_path / "state", stub(stub_model))) as watch:
        with pytest.raises(RuntimeError, match="not a number"):
            await anyio.to_thread.run_sync(fails)
        await watch.routed(E0, 1, step=0)
        meta = (await reached(watch.job, within_s=WITHIN_S)).meta
        assert meta is not None and not meta.finished


def test_a_model_that_is_nowhere_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="is no directory"):
        weight_transfer("redis://x", job=JOB, directory=tmp_path, model="no/such-model")


def test_disabled_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELIGHT_DISABLE", "1")
    assert weight_transfer("redis://x", job=JOB, directory=tmp_path, model="no/such-model") is None
