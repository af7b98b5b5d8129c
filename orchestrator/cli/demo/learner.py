"""What the demo's trainer trains: the tiny Qwen2 in torch, or two arrays in numpy. One AdamW step each."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from relight.orchestrator.cli.demo.evidence import Tensor
from relight.orchestrator.cli.demo.model import SEED, VOCABULARY

RATE = 1e-3
"""Learning rate: AdamW's first step moves each parameter by about this much."""
BATCH, LENGTH = 4, 32
"""Sequences and tokens of the one batch."""


class Step(NamedTuple):
    """What one optimizer step did."""

    loss: float
    largest_change: float
    """Largest absolute change of any parameter."""


class Learner(Protocol):
    """A model with its optimizer."""

    model: Any
    """What `relight.SnapshotSync` takes."""

    def step(self) -> Step:
        """One optimizer step."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter as it is now."""
        ...


def load(kind: str, base: Path) -> Learner:
    """The base model, ready to be trained."""
    return _Torch(base) if kind == "vllm" else _Numpy(base)


def _told(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: Tensor(
            dtype="F32", shape=tuple(array.shape), sha256=hashlib.sha256(array.tobytes()).hexdigest()
        )
        for name, array in arrays.items()
    }


def _largest_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    return max(float(np.abs(after[name] - before[name]).max()) for name in before)


class _Torch:
    def __init__(self, base: Path) -> None:
        import torch as torch_
        import transformers

        torch, qwen2 = cast(Any, torch_), cast(Any, transformers).Qwen2ForCausalLM
        torch.manual_seed(SEED)
        self._torch = torch
        self.model = qwen2.from_pretrained(base, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def step(self) -> Step:
        before = self._arrays()
        tokens = self._torch.randint(0, VOCABULARY, (BATCH, LENGTH))
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Step(float(loss.detach()), _largest_change(before, self._arrays()))

    def tensors(self) -> dict[str, Tensor]:
        return _told(self._arrays())

    def _arrays(self) -> dict[str, Any]:
        return {name: value.detach().cpu().numpy().copy() for name, value in self.model.state_dict().items()}


class _Numpy:
    """Next-token prediction by embedding and head, with its gradient by hand."""

    def __init__(self, base: Path) -> None:
        from safetensors import numpy as safetensors

        self.model: dict[str, Any] = cast(Any, safetensors).load_file(base / "model.safetensors")
        self._moments = {name: (np.zeros_like(a), np.zeros_like(a)) for name, a in self.model.items()}
        self._steps = 0

    def step(self) -> Step:
        before = {name: array.copy() for name, array in self.model.items()}
        tokens = np.random.default_rng(SEED).integers(0, VOCABULARY, size=(BATCH, LENGTH))
        loss, gradients = self._loss(tokens[:, :-1].ravel(), tokens[:, 1:].ravel())
        self._steps += 1
        for name, gradient in gradients.items():
            self._adamw(name, gradient)
        return Step(loss, _largest_change(before, self.model))

    def tensors(self) -> dict[str, Tensor]:
        return _told(self.model)

    def _loss(self, inputs: Any, targets: Any) -> tuple[float, dict[str, Any]]:
        """Mean cross-entropy in nats, and its gradient for each array."""
        embed, head = self.model["model.embed.weight"], self.model["model.head.weight"]
        hidden = embed[inputs]
        logits = hidden @ head
        logits -= logits.max(axis=1, keepdims=True)
        rows = np.arange(len(targets))
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        slope = np.exp(logprobs)
        slope[rows, targets] -= 1.0
        slope /= len(targets)
        to_embed = np.zeros_like(embed)
        np.add.at(to_embed, inputs, slope @ head.T)
        loss = float(-logprobs[rows, targets].mean())
        return loss, {"model.embed.weight": to_embed, "model.head.weight": hidden.T @ slope}

    def _adamw(
        self, name: str, gradient: Any, *, decay: float = 0.01, first: float = 0.9, second: float = 0.999
    ) -> None:
        """Change the array in place, as in Loshchilov and Hutter 2019, algorithm 2."""
        mean, square = self._moments[name]
        mean += (1 - first) * (gradient - mean)
        square += (1 - second) * (gradient**2 - square)
        unbiased = mean / (1 - first**self._steps)
        spread = np.sqrt(square / (1 - second**self._steps)) + 1e-8
        self.model[name] -= (RATE * (unbiased / spread + decay * self.model[name])).astype(np.float32)
