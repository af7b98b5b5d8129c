"""The toy task: a prompt names one of four classes, and every token of the answer shall be of that class.

A token's class is its id modulo four, so a model that knows nothing is right a quarter of the time, and one
that attends to the prompt's first token is right always.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

VOCABULARY = 64
CLASSES = 4
PROMPT_TOKENS = 4


def prompts(seed: int, *, step: int, count: int) -> list[list[int]]:
    """That many prompts: a class, each of them equally often, and tokens that mean nothing."""
    draw = np.random.default_rng((seed, step))
    noise = draw.integers(CLASSES, VOCABULARY, size=(count, PROMPT_TOKENS - 1))
    return [[number % CLASSES, *map(int, noise[number])] for number in range(count)]


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of the answer's tokens that are of the prompt's class: 0 to 1."""
    return sum(token % CLASSES == prompt[0] for token in answer) / len(answer)


def make_model(folder: Path) -> None:
    """Save a Qwen2 with 120 thousand random weights, the same ones each time."""
    import torch
    import transformers

    torch.manual_seed(20)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
