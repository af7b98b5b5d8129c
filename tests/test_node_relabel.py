"""A model with its hidden dimension renumbered: other bytes in each tensor, and the same function."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from relight.agents.node import relabel

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": True},
    "Llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


@pytest.mark.parametrize("family", MODELS)
def test_a_renumbered_model_is_the_same_function(family: str, tmp_path: Path) -> None:
    torch.manual_seed(20)
    config = getattr(transformers, f"{family}Config")(**COMMON, **MODELS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # norms and biases begin as ones and zeros, which no numbering tells apart
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "own", max_shard_size=20_000)
    axes = relabel.axes(tmp_path / "own")
    assert axes is not None
    relabel.write(tmp_path / "own", tmp_path / "other", axes)
    other = type(model).from_pretrained(tmp_path / "other").eval()
    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        expected, found = (each(input_ids=tokens).logits.log_softmax(-1) for each in (model, other))
    assert torch.allclose(expected, found, atol=1e-4)
    for path in (tmp_path / "own").glob("*.safetensors"):
        before, after = load_file(path), load_file(tmp_path / "other" / path.name)
        for name in before:
            changed = not np.array_equal(before[name], after[name])
            assert changed is (axes[name] is not None), name


@pytest.mark.parametrize(
    "name", ["model.layers.0.mixer.in_proj.weight", "model.embed_tokens.weight_scale", "w"]
)
def test_a_model_with_a_tensor_that_is_not_known_is_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    embedding = {"model.embed_tokens.weight": np.ones((8, 4), np.float32)}
    save_file(embedding, tmp_path / "a.safetensors")
    assert relabel.axes(tmp_path) == {"model.embed_tokens.weight": 1}
    save_file({name: np.ones((4, 4), np.float32)}, tmp_path / "b.safetensors")
    assert relabel.axes(tmp_path) is None


def test_a_model_without_a_hidden_size_is_left_alone(tmp_path: Path) -> None:
    save_file({"model.norm.weight": np.ones(4, np.float32)}, tmp_path / "a.safetensors")
    assert relabel.axes(tmp_path) is None
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    assert relabel.axes(tmp_path) is None
