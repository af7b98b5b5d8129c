"""Of applications whose Ray actor holds an engine: a call of the actor's own, and the frame around it."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from relight.agents.adapters.asyncllm import Actors, Bundle, actors
from relight.events.ids import EngineName

ENGINE = EngineName("e0")
AT = 24
"""Tokens after which is struck."""


def sampling(length: int) -> dict[str, Any]:
    return {"max_tokens": length, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}


class Direct:
    """A caller of the actor's own method, without relight: how its call ends, and what it has by then."""

    def __init__(self, handle: Any, prompt: Sequence[int], length: int) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.begun = asyncio.Event()
        self._generate = handle.generate.options(num_returns="streaming")
        self._prompt = prompt
        self._length = length

    async def run(self) -> None:
        stream = self._generate.remote(self._prompt, sampling(self._length), f"direct-{id(self)}")
        try:
            async for ref in stream:
                (delta,) = (await ref)["choices"]
                self.tokens += delta["token_ids"]
                if len(self.tokens) >= AT:
                    self.begun.set()
        except Exception as error:  # noqa: BLE001 -- which one it is, is what is asked
            self.error = error


def living(there: Actors) -> tuple[int, Any]:
    """The incarnation of the engine that is there, and its actor."""
    found = there.handle(ENGINE)
    assert found is not None
    return found


def played(
    scenario: Callable[[Actors], Awaitable[dict[str, Any]]],
    *,
    job: str,
    state_dir: str,
    ray_dir: str,
    cpus: int,
) -> None:
    """Play it in a cluster of its own, and print what it saw, and in which group, as one line of JSON."""
    os.environ.update(RAY_worker_niceness="0")  # Ray's own 15 would have it wait for everything else here
    ray.init(
        num_cpus=cpus, include_dashboard=False, _temp_dir=ray_dir, log_to_driver=False,
        object_store_memory=100 * 1024 * 1024, namespace="app",
    )  # fmt: skip
    try:
        group = ray.util.placement_group([{"CPU": 1}])
        with actors(state_dir, {ENGINE: Bundle(group)}, job=job, connect_s=60.0) as there:
            print("ready", flush=True)

            async def play() -> dict[str, Any]:
                return await scenario(there)

            report = asyncio.run(play())
        print(json.dumps({**report, "group": group.id.hex()}))
    finally:
        ray.shutdown()
