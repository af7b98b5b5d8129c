"""The client against unstreamed real vLLM, and how much of a stream is lost with its engine."""

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

import anyio
from benchmarks.replay.figures import Figure, ratio
from benchmarks.replay.reading import ours, rounds
from benchmarks.replay.rig import JOB, LABEL, PROMPT, bare, params, plain_http
from tests.replay_job import E0, orchestrator
from tests.vllm_engine import Engine, vllm_engine

from relight.agents.replay.client import ReplayClient
from relight.agents.replay.turn import Turn
from relight.events.bus.embedded import embedded

BAR = 0.8
INTERVAL = 16
STREAMS, TOKENS = 64, 400
LOST_STREAMS = 16


async def measure(root: Path) -> list[Figure]:
    if importlib.util.find_spec("vllm") is None:
        print("  vLLM is not installed: left out", file=sys.stderr)
        return []
    root.mkdir()
    with (
        vllm_engine(root / "engine", "--stream-interval", str(INTERVAL)) as engine,
        embedded(root / "bus") as bus,
    ):
        engine.post("/update_weight_version", {"new_version": LABEL})
        async with orchestrator(bus.url) as mind:
            await mind.route(E0, 1, engine.port)
            async with ReplayClient(bus.url, job=JOB) as client:
                return [*await throughput(engine, client), await loss(engine, client)]


async def throughput(engine: Engine, client: ReplayClient) -> list[Figure]:
    async with plain_http() as http:
        whole = bare(http, engine.port, tokens=TOKENS, stream=False)
        found = await rounds((whole, ours(client, TOKENS)), STREAMS)
    rates = [(one.tokens_s, other.tokens_s) for one, other in found]
    return [
        Figure(
            f"unstreamed vLLM, {STREAMS} calls", sorted(one for one, _ in rates)[len(rates) // 2], "tokens/s"
        ),
        Figure(
            f"client on vLLM, {STREAMS} streams", sorted(two for _, two in rates)[len(rates) // 2], "tokens/s"
        ),
        Figure(f"client by unstreamed vLLM, interval {INTERVAL}", ratio(rates), "", BAR),
    ]


async def loss(engine: Engine, client: ReplayClient) -> Figure:
    """Stop the engine's core in mid-stream: what its server had of it, less what has arrived here.

    A stopped core sends no more, and its server passes on all that it is going to: what is missing then is
    what a kill in that moment would have cost.
    """
    turns: list[Turn] = []
    before = sampled(engine)

    async def generate() -> None:
        turns.append(await client.generate(PROMPT, params(TOKENS)))

    async with anyio.create_task_group() as tasks:
        for _ in range(LOST_STREAMS):
            tasks.start_soon(generate)
        while sampled(engine) - before < LOST_STREAMS * TOKENS / 4:
            await anyio.sleep(0.01)
        os.kill(engine.core, signal.SIGSTOP)
        await settled(engine)
        client.abort()
    received = sum(len(turn.token_ids) for turn in turns)
    assert 0 < received < LOST_STREAMS * TOKENS, received
    lost = (sampled(engine) - before - received) / LOST_STREAMS
    return Figure("tokens lost a stream and death, vLLM", lost, "tokens", float(INTERVAL), "most")


async def settled(engine: Engine) -> None:
    """Until its counter stands still, and what it counted has had time to arrive."""
    last = -1.0
    while (now := sampled(engine)) != last:
        last = now
        await anyio.sleep(0.5)


def sampled(engine: Engine) -> float:
    """Tokens that its core has sampled, as its server knows."""
    found = re.search(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", engine.metrics(), re.MULTILINE)
    assert found is not None
    return float(found[1])
