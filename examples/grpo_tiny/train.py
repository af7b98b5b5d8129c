"""GRPO whose engines may die: the loop as it would be without relight, and four calls of relight in it.

`relight.trainer` begins a run, `trainer.sync` hands the weights to every engine, `trainer.wait` samples while
a recovery may export them, and `client.group` samples a prompt's group, whatever happens to the engines.
"""

import argparse
import asyncio
import json
import time
from functools import partial
from typing import Any, NamedTuple

import task
import torch
import transformers

import relight

PROMPTS, GROUP = 8, 16
"""Prompts a step, and samples a prompt."""
TOKENS = 16
"""Of each answer."""
EPOCHS, CLIP, RATE = 2, 0.2, 4e-3
"""Updates a batch, the importance ratio's bounds, and AdamW's rate, which falls to a tenth of it."""
LAG = 0
"""Steps that a sample's weights may be behind the trainer's; a loop that samples ahead would allow one."""


class Batch(NamedTuple):
    """One row a sample."""

    ids: torch.Tensor
    """Prompt and answer."""
    sampled: torch.Tensor
    """Logprobs of the answer's tokens, as the engine told them when it sampled them."""
    rewards: torch.Tensor


async def rollout(bus: str, job: str, prompts: list[list[int]], draws: int) -> tuple[list[Any], Any]:
    """The group of every prompt, sampled with seeds from `draws` on, and what replays did to them."""
    sampling = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    async with relight.ReplayClient(bus, job=job) as client:
        asked = [
            client.group(prompt, {**sampling, "seed": draws + number * GROUP}, n=GROUP)
            for number, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*asked), client.numbers()


def whole(groups: list[Any]) -> list[Any]:
    """Every turn of every group; raises where one is missing or was cut off."""
    for group in groups:
        assert len(group) == GROUP, f"a group of {len(group)}, asked for {GROUP}"
        for turn in group:
            if isinstance(turn, relight.ReplayError):
                raise turn
            assert turn.complete and len(turn.token_ids) == len(turn.logprobs) == TOKENS
    return [turn for group in groups for turn in group]


def is_stale(turn: Any, run: int, step: int) -> bool:
    """Whether a token came from weights that are too old, or that nobody knows."""
    fresh = {f"{run}.{number}" for number in range(step - LAG, step + 1)}
    return sum(span.end - span.start for span in turn.versions if span.version in fresh) != TOKENS


def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of each answer's tokens, by the weights as they are."""
    scores = model(input_ids=ids[:, :-1]).logits[:, task.PROMPT_TOKENS - 1 :].log_softmax(-1)
    return scores.gather(-1, ids[:, task.PROMPT_TOKENS :, None])[..., 0]


def batch_of(prompts: list[list[int]], groups: list[Any]) -> Batch:
    """What is learned from; a prompt's group stays together."""
    pairs = [(prompt, turn) for prompt, group in zip(prompts, groups, strict=True) for turn in group]
    return Batch(
        ids=torch.tensor([[*prompt, *turn.token_ids] for prompt, turn in pairs]),
        sampled=torch.tensor([turn.logprobs for _, turn in pairs]),
        rewards=torch.tensor([task.reward(prompt, turn.token_ids) for prompt, turn in pairs]),
    )


def learn(model: Any, optimizer: Any, batch: Batch) -> float:
    """The clipped updates of one batch; how far the engines' logprobs are from the trainer's, in nats."""
    groups = batch.rewards.view(-1, GROUP)
    spread = groups.std(dim=1, keepdim=True) + 1e-4
    advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
    drift = None
    for _ in range(EPOCHS):
        ratio = (logprobs_of(model, batch.ids) - batch.sampled).exp()
        drift = float(ratio.log().abs().max()) if drift is None else drift
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return drift


def train(args: argparse.Namespace, seed: int) -> None:
    """One run: `args.steps` steps, one line of JSON for each."""
    model = transformers.Qwen2ForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.steps)
    sync = relight.SnapshotSync(model, args.snapshots)
    with relight.trainer(args.bus, job=args.job, sync=sync) as trainer:
        trainer.sync(0)
        for step in range(args.steps):
            began = time.perf_counter()
            prompts = task.prompts(seed, step=step, count=PROMPTS)
            draws = (seed * args.steps + step) * PROMPTS * GROUP
            groups, replays = trainer.wait(partial(rollout, args.bus, args.job, prompts, draws))
            stale = sum(is_stale(turn, trainer.run, step) for turn in whole(groups))
            assert stale == 0, f"{stale} samples of step {step} are of weights more than {LAG} steps old"
            batch = batch_of(prompts, groups)
            drift = learn(model, optimizer, batch)
            schedule.step()
            trainer.sync(step + 1)
            told = {
                "seed": seed,
                "step": step,
                "reward": float(batch.rewards.mean()),
                "asked": PROMPTS * GROUP,
                "learned": len(batch.ids),
                "stale": stale,
                "interrupted": replays["turns_interrupted"],
                "kept": replays["tokens_kept"],
                "drift": drift,
                "seconds": time.perf_counter() - began,
            }
            print(json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bus", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--snapshots", required=True, help="folder that the engines' node reaches too")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="one run each")
    args = parser.parse_args()
    for seed in args.seeds:
        train(args, seed)


if __name__ == "__main__":
    main()
