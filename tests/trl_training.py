"""TRL's own AsyncGRPO trainer as a process: its loop, its rollout worker, its losses; on CPU.

Three things are the test's: the attention kernel, which TRL takes from the hub for GPUs and which is written
out in torch here; no look at the GPU's name; and a recorder of the samples that the loss was given.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any


def flash_attn_varlen_func(  # noqa: PLR0917 -- the kernel's signature
    query: Any,
    key: Any,
    value: Any,
    starts_q: Any,
    starts_k: Any,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None = None,
    **_: Any,
) -> Any:
    """Causal attention of each segment to its own path, whose last rows are the segment itself."""
    import torch

    scale = softmax_scale or 1 / math.sqrt(query.shape[-1])
    heads = query.shape[1] // key.shape[1]
    out = []
    bounds_q, bounds_k = starts_q.tolist(), starts_k.tolist()
    for at in range(len(bounds_q) - 1):
        rows = query[bounds_q[at] : bounds_q[at + 1]].transpose(0, 1)
        path = slice(bounds_k[at], bounds_k[at + 1])
        keys = key[path].transpose(0, 1).repeat_interleave(heads, 0)
        values = value[path].transpose(0, 1).repeat_interleave(heads, 0)
        scores = rows @ keys.transpose(1, 2) * scale
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        out.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """How many tokens of a completion have even ids."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class Recording:
    """The rollout worker's queue, and a line for every sample that is taken from it."""

    def __init__(self, queue: Any, path: Path) -> None:
        self._queue = queue
        self._path = path

    def get(self, timeout: float) -> Any:
        sample = self._queue.get(timeout=timeout)
        told = {
            "input_ids": sample.input_ids.tolist(),
            "mask": sample.completion_mask.tolist(),
            "logprobs": sample.old_log_probs.tolist(),
            "group": sample.group_id,
            "version": sample.model_version,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(told) + "\n")
        return sample

    def qsize(self) -> int:
        return int(self._queue.qsize())


def main(plan: dict[str, Any]) -> None:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from relight.agents.adapters.trl import weight_transfer

    packing._flash_attn = lambda: sys.modules[__name__]
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # of a GPU's name
    prompts = [[{"role": "user", "content": f"{number} words"}] for number in range(40)]
    transfer = weight_transfer(
        plan["bus"],
        job=plan["job"],
        directory=plan["snapshots"],
        model=plan["model"],
        step=lambda: trainer.state.global_step,
        keep=1000,
    )
    tokenizer = AutoTokenizer.from_pretrained(plan["model"])
    tokenizer.chat_template = (Path(trl.__path__[0]) / "chat_templates" / "qwen3.jinja").read_text()
    trainer = AsyncGRPOTrainer(
        model=plan["model"],
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        weight_transfer=transfer,
        args=AsyncGRPOConfig(
            output_dir=plan["output"],
            vllm_server_base_url=plan["server"],
            max_steps=plan["steps"],
            learning_rate=1e-2,
            num_generations=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            token_budget=0,
            max_completion_length=plan["tokens"],
            queue_maxsize=8,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
    )
    trainer.rollout_queue = Recording(trainer.rollout_queue, Path(plan["samples"]))
    trainer.train()
    assert trainer.state.global_step == plan["steps"] == trainer.model_version - 1
    trainer.save_model(plan["output"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
