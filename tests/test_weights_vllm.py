"""Weights with real vLLM: a reload that spoils a model is found out, and a transfer reaches its engine."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from relight.agents.adapters import vllm as http
from relight.agents.node import canary
from relight.agents.node.config import Engine
from relight.agents.trainer.sync import Left
from relight.agents.trainer.transfer import VllmTransferSync
from relight.events.bus.embedded import Embedded
from relight.events.decisions import SyncWeights
from relight.events.facts import EngineStarted, Healthy
from relight.events.ids import DecisionId, EngineName, SyncId
from relight.events.values import Loaded, Member
from relight.events.version import BASE, Version
from tests.node_support import directing, node_file

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(420),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PLAIN, TIED = EngineName("plain"), EngineName("tied")
START_S = 360.0
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def model(directory: Path, *, tied: bool, seed: int) -> Any:
    """A tiny Qwen2 with random weights, saved; also as it is."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        max_position_embeddings=512,
    )
    made = Qwen2ForCausalLM(config)
    made.save_pretrained(directory)
    return made


def served(name: EngineName, folder: Path, *, pythonpath: str) -> Engine:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--skip-tokenizer-init", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--enable-scale-out"]
    command += ["--weight-transfer-config", json.dumps({"backend": "relight_sockets"})]
    path = os.pathsep.join(filter(None, (pythonpath, os.environ.get("PYTHONPATH"))))
    return Engine(name=name, command=tuple(command), env={**ENV, "PYTHONPATH": path})


def logprobs(model: Any) -> list[float]:
    """What the trainer's own model gives the canary's tokens."""
    import torch

    with torch.no_grad():
        tokens = torch.tensor([canary.PROMPT])
        scores = model(input_ids=tokens).logits.log_softmax(-1)[0]
    return [float(scores[at, token]) for at, token in enumerate(canary.PROMPT[1:])]


def order(step: int, *members: Member) -> SyncWeights:
    return SyncWeights(
        id=DecisionId("1-1"),
        epoch=1,
        reason="test",
        sync=SyncId(f"s{step}"),
        run=7,
        boundary=1,
        version=Version(7, step),
        members=members,
        deadline=0,
    )


async def test_a_reload_that_spoils_is_found_and_weights_are_transferred_from_memory(
    server: Embedded, tmp_path: Path
) -> None:
    from tests import vllm_sockets

    vllm_sockets.register()
    path = vllm_sockets.plugin(tmp_path / "plugin")
    model(tmp_path / "plain", tied=False, seed=1)
    model(tmp_path / "tied", tied=True, seed=1)
    file = node_file(
        tmp_path / "state",
        served(PLAIN, tmp_path / "plain", pythonpath=path),
        served(TIED, tmp_path / "tied", pythonpath=path),
    )
    async with directing(file, server.url) as player:
        starts = {name: player.start(engine=name, seconds=START_S) for name in (PLAIN, TIED)}
        await player.decide(*starts.values())
        plain = await player.wait(EngineStarted, lambda fact: fact.engine == PLAIN, within_s=START_S)
        assert plain.reloads is True
        healthy = await player.ask(Healthy, player.verify(BASE, engine=PLAIN), within_s=60)
        assert healthy.evidence["tensors_compared"] > 0

        trained = model(tmp_path / "trained", tied=False, seed=2)
        sync = VllmTransferSync(trained, backend=vllm_sockets.BACKEND, timeout_s=60)
        next_trainers = VllmTransferSync(trained, backend=vllm_sockets.BACKEND, timeout_s=60)
        member = Member(PLAIN, 1, plain.address)
        # A serving engine, by a group that is made, by one that stands, and by another trainer's.
        for step, ours in ((1, sync), (2, sync), (3, next_trainers)):
            answer = await anyio.to_thread.run_sync(
                ours.export, order(step, member), Left((member,), lambda _: False)
            )
            assert answer.loaded == (Loaded(PLAIN, 1),), answer
        async with http.session() as session:
            engine = http.Client(session, plain.address)
            assert await engine.label(within_s=10) == "7.3"
            assert not await engine.is_paused(within_s=10)
            seen = await engine.canary(canary.PROMPT, within_s=30)
        assert seen.logprobs[:-1] == pytest.approx(logprobs(trained), abs=1e-3)
        next_trainers.close()
        sync.close()

        tied = await player.wait(EngineStarted, lambda fact: fact.engine == TIED, within_s=START_S)
        assert tied.reloads is False
        again = await player.ask(Healthy, player.verify(BASE, engine=TIED), within_s=60)
        assert again.canary is not None
        right = model(tmp_path / "again", tied=True, seed=1)
        assert again.canary.logprobs[:-1] == pytest.approx(logprobs(right), abs=1e-3)
