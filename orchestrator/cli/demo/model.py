"""The demo's base models: a seeded tiny Qwen2 for vLLM, two seeded arrays for the stub. Made locally.

They are written without torch, whose import takes longer than everything else that is done here.
"""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np

from relight.orchestrator.cli.demo.evidence import Kind

SEED = 20
VOCABULARY = 512
HIDDEN, INTERMEDIATE, HEADS = 64, 128, 2
LAYERS = 12
"""64 tokens take 0.3 s on one core, so that they are far from over when the eighth chunk has come."""
SPREAD = 0.2
"""Standard deviation of weights: far enough from uniform that rounding never decides a greedy token."""

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,  # vLLM's CPU build reloads tied ones wrongly
    "bos_token_id": None,
    "eos_token_id": None,
}


def make(kind: Kind, directory: Path) -> None:
    """Write the base model of that kind of engine; the same bytes each time."""
    from safetensors import numpy as safetensors

    draw = np.random.default_rng(SEED)
    arrays, config = _qwen2(draw) if kind == "vllm" else _arrays(draw)
    directory.mkdir(parents=True)
    save: Any = cast(Any, safetensors).save_file
    save(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _qwen2(draw: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    def matrix(rows: int, columns: int) -> Any:
        return draw.normal(scale=SPREAD, size=(rows, columns)).astype(np.float32)

    def ones() -> Any:
        return np.ones(HIDDEN, np.float32)

    arrays = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones(),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            arrays[f"{layer}.self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("q_proj", "k_proj", "v_proj"):
            arrays[f"{layer}.self_attn.{name}.bias"] = np.zeros(HIDDEN, np.float32)
        for name in ("gate_proj", "up_proj"):
            arrays[f"{layer}.mlp.{name}.weight"] = matrix(INTERMEDIATE, HIDDEN)
        arrays[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{layer}.{name}.weight"] = ones()
    return arrays, QWEN2


def _arrays(draw: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {
        "model.embed.weight": draw.normal(size=(VOCABULARY, 16)).astype(np.float32),
        "model.head.weight": draw.normal(scale=0.25, size=(16, VOCABULARY)).astype(np.float32),
    }
    return arrays, {"model_type": "stub", "vocab_size": VOCABULARY}


def prompt(seed: int, *, length: int) -> tuple[int, ...]:
    """A prompt of that many token ids; the same for the same seed."""
    return tuple(int(token) for token in np.random.default_rng(seed).integers(1, VOCABULARY, size=length))
