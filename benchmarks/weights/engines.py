"""Syncs of real vLLM on CPU: from the trainer's boundary to the route, and models that vLLM reloads wrongly.

Everything is real: an agent, an orchestrator, a trainer with a tiny model in torch, vLLM's own processes.
"""

import importlib.util
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import anyio
from benchmarks.weights import rig
from benchmarks.weights.figures import Figure

import relight
from relight.agents.node import canary
from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.job import JobBus
from relight.events.facts import EngineStarted, Fact, Healthy, WeightsLoaded
from relight.events.ids import BEGINNING
from relight.events.schema import Snapshot
from relight.events.values import Canary
from relight.events.version import Version
from relight.orchestrator.cli.demo.faults import core_of

BAR_MS = 500.0
SYNCS = 20
START_S = 300.0
CLOSE = 1e-3
"""Nats between vLLM and transformers in float32."""
ENV = (
    'env = { VLLM_CPU_KVCACHE_SPACE = "1", HF_HUB_OFFLINE = "1", VLLM_NO_USAGE_STATS = "1",'
    ' VLLM_SERVER_DEV_MODE = "1", TORCHDYNAMO_DISABLE = "1", OMP_NUM_THREADS = "1" }'
)


def there() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _engine(root: Path) -> str:
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{weights}"]
    words += ["--host", "127.0.0.1", "--port", "{port}", "--skip-tokenizer-init", "--dtype", "float32"]
    words += ["--enforce-eager", "--max-model-len", "512", "--enable-scale-out"]
    command = ", ".join(f'"{word}"' for word in words)
    head = f'[[engines]]\nname = "engine-0"\nmodel = "{root}/base"\nstall_s = 60.0\n'
    return f"{head}command = [{command}]\n{ENV}\n"


def model(kind: str, folder: Path) -> Any:
    """A tiny model with random weights: `plain` and `tied` Qwen2, `moe` Qwen2-MoE; saved, and in torch."""
    import torch
    import transformers

    torch.manual_seed(20)
    torch.set_num_threads(1)
    common: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind == "tied",
    }
    made: Any
    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
        sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        config = transformers.Qwen2MoeConfig(**common, **experts, **sizes)
        made = transformers.Qwen2MoeForCausalLM(config)
    else:
        made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    made.save_pretrained(folder)
    return made


def _logprobs(model: Any) -> list[float]:
    import torch

    with torch.no_grad():
        scores = model(input_ids=torch.tensor([canary.PROMPT])).logits.log_softmax(-1)[0]
    return [float(scores[at, token]) for at, token in enumerate(canary.PROMPT[1:])]


def _step(model: Any) -> None:
    """A change of every parameter that no rounding hides."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def boundary_to_route(root: Path) -> list[Figure]:
    """Ordinary syncs of an engine that serves, after a step each, and the engine's own load in them."""
    root.mkdir()
    trained = model("plain", root / "base")
    took: list[float] = []
    with (
        rig.job(root, _engine(root), names=1, within_s=START_S) as url,
        relight.trainer(url, job=rig.JOB, sync=relight.SnapshotSync(trained, root / "weights")) as trainer,
    ):
        for step in range(SYNCS + 1):
            _step(trained)
            began = time.perf_counter()
            trainer.sync(step)
            took.append(time.perf_counter() - began)
        seen = trainer.wait(lambda: anyio.run(_canary_at, url, Version(trainer.run, SYNCS)))
        loads = [fact.seconds for fact in anyio.run(_facts, url) if isinstance(fact, WeightsLoaded)][1:]
        off = _off(seen.logprobs[:-1], _logprobs(trained))
    whole = [1000.0 * each for each in took[1:]]
    load = 1000.0 * statistics.median(loads)
    return [
        Figure("boundary to route", statistics.median(whole), "ms in the median", BAR_MS),
        Figure("boundary to route", max(whole), "ms at most"),
        Figure("of which the engine's load", load, "ms"),
        Figure("logprobs off the trainer's own", off, "nats", CLOSE),
    ]


def recovered(root: Path, kind: str) -> list[Figure]:
    """Start, sync, kill: the engine is only ever started on weights, and computes what the trainer does."""
    root.mkdir()
    trained = model(kind, root / "base")
    with (
        rig.job(root, _engine(root), names=1, within_s=START_S) as url,
        relight.trainer(url, job=rig.JOB, sync=relight.SnapshotSync(trained, root / "weights")) as trainer,
    ):
        _step(trained)
        trainer.sync(0)
        version = Version(trainer.run, 0)
        trainer.wait(lambda: anyio.run(_served, url, version, 2))
        facts = anyio.run(_facts, url)
        first = next(fact for fact in facts if isinstance(fact, EngineStarted))
        anyio.run(_kill, url)
        trainer.wait(lambda: anyio.run(_served, url, version, 3))
        facts = anyio.run(_facts, url)
        proofs = [fact for fact in facts if isinstance(fact, Healthy) and fact.version == version]
        off = max(_off(proof.canary.logprobs[:-1], _logprobs(trained)) for proof in proofs if proof.canary)
        loads = sum(isinstance(fact, WeightsLoaded) for fact in facts)
    found = float(first.reloads is False)
    return [
        Figure(f"{kind}: its wrong reload was found", found, "(1: yes)", 1, more_is_better=True),
        Figure(f"{kind}: loads in place", float(loads), "", 0),
        Figure(f"{kind}: logprobs off the trainer's own after a kill", off, "nats", CLOSE),
    ]


def _off(seen: Any, expected: list[float]) -> float:
    return max(abs(found - wanted) for found, wanted in zip(seen, expected, strict=True))


async def _facts(url: str) -> list[Fact]:
    async with open_bus(url) as bus:
        entries = await bus.job(rig.JOB).read_facts(BEGINNING, count=100_000)
        return [codec.decode_fact(entry) for entry in entries]


async def _canary_at(url: str, version: Version) -> Canary:
    """The canary that a member runs aside at a new version."""
    with anyio.fail_after(START_S):
        while True:
            for fact in await _facts(url):
                if isinstance(fact, Healthy) and fact.version == version and fact.canary is not None:
                    return fact.canary
            await anyio.sleep(0.1)


async def _kill(url: str) -> None:
    started = [fact for fact in await _facts(url) if isinstance(fact, EngineStarted)][-1]
    os.kill(core_of(started.processes).pid, signal.SIGKILL)


async def _served(url: str, version: Version, incarnation: int) -> None:
    """Until this incarnation is routed at `version`."""
    async with open_bus(url) as bus:
        with anyio.fail_after(START_S):
            while not _is_routed(await _state(bus.job(rig.JOB)), version, incarnation):
                await anyio.sleep(0.1)


async def _state(job: JobBus) -> Snapshot:
    return await job.snapshot()


def _is_routed(snapshot: Snapshot, version: Version, incarnation: int) -> bool:
    (engine,) = snapshot.engines.values()
    routed = engine.route is not None and engine.route.version == version
    return routed and engine.incarnation >= incarnation
