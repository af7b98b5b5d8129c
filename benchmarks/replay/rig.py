"""A bus, an orchestrator's voice on it, stub engines of one model, and streams that are read in waves."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import anyio
import msgspec
from tests.replay_job import JOB, Orchestrator, orchestrator

from relight.agents.stub.launch import Stub, launch, make_model
from relight.events.bus.embedded import embedded

__all__ = ["JOB", "LABEL", "PROMPT", "Rig", "Wave", "bare", "params", "plain_http", "rig", "wave"]

PROMPT = (5, 6, 7)
LABEL = "7.1"


class Rig(NamedTuple):
    url: str
    """The bus."""
    mind: Orchestrator
    stubs: list[Stub]


@asynccontextmanager
async def rig(root: Path, *flags: str, engines: int) -> AsyncGenerator[Rig]:
    """So many stubs, of which none is routed yet."""
    root.mkdir()
    model = make_model(root / "model", seed=1)
    with ExitStack() as stack:
        stubs = [stack.enter_context(launch(model, *flags)) for _ in range(engines)]
        for stub in stubs:
            stub.post("/update_weight_version", {"new_version": LABEL})
        url = stack.enter_context(embedded(root / "bus")).url
        async with orchestrator(url) as mind:
            yield Rig(url, mind, stubs)


class Wave(NamedTuple):
    """What a number of streams at once cost."""

    tokens_s: float
    """Tokens a second, all streams together."""
    cpu_us: float
    """CPU microseconds of this process a token."""


async def wave(read: Callable[[], Awaitable[int]], streams: int) -> Wave:
    """Have `read` read so many streams at once; each answers its tokens."""
    tokens = 0

    async def one() -> None:
        nonlocal tokens
        read_now = await read()
        tokens += read_now

    began, cpu = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(streams):
            tasks.start_soon(one)
    took_s, spent_s = time.perf_counter() - began, time.process_time() - cpu
    return Wave(tokens / took_s, spent_s / tokens * 1e6)


def params(max_tokens: int) -> dict[str, object]:
    return {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}


def bare(
    http: aiohttp.ClientSession, port: int, *, tokens: int, stream: bool = True
) -> Callable[[], Awaitable[int]]:
    """The least that can be done: post, and read the bytes without looking at them."""
    asked = {"token_ids": PROMPT, "sampling_params": params(tokens), "stream": stream}
    body = msgspec.json.encode(asked)
    url = f"http://127.0.0.1:{port}/inference/v1/generate"

    async def read() -> int:
        async with http.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 200, await answer.text()
            while await answer.content.readany():
                pass
        return tokens

    return read


@asynccontextmanager
async def plain_http() -> AsyncGenerator[aiohttp.ClientSession]:
    """A session without limits."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as http:
        yield http
