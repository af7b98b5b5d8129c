"""From RouteAdded to the replays' arrival at the new engine, by the clock of that engine's own log."""

import re
import time
from pathlib import Path
from statistics import median

import anyio
from benchmarks.replay.figures import Figure
from benchmarks.replay.rig import JOB, PROMPT, Rig, params, rig
from tests.replay_job import E0

from relight.agents.replay.client import ReplayClient
from relight.agents.stub.launch import Stub

BAR_MS = 20.0
TURNS = ((1, BAR_MS), (16, BAR_MS), (64, None))
"""Turns that wait for the route, and the bar. To send one costs half a millisecond of one core: the median of
many is the machine's."""
ROUNDS = 10
TOKENS = 40
SETTLE_S = 0.5
"""After the fence: every turn waits for a route by then."""
WITHIN_S = 30.0


async def measure(root: Path) -> list[Figure]:
    figures: list[Figure] = []
    async with rig(root, "--max-num-seqs", "1000", engines=2) as at, ReplayClient(at.url, job=JOB) as client:
        incarnation = 0
        for turns, bar in TURNS:
            found: list[float] = []
            for _ in range(ROUNDS):
                found += await storm(at, client, turns, incarnation)
                incarnation += 2
            figures.append(
                Figure(f"replay start after RouteAdded, {turns} turns, p50", median(found), "ms", bar, "most")
            )
    return figures


async def storm(at: Rig, client: ReplayClient, turns: int, incarnation: int) -> list[float]:
    """An engine breaks all its streams, and its replacement is routed; when each replay arrived there."""
    dying, next_one = at.stubs
    dying.knobs(stream_fault="eof", stream_fault_after=10)
    next_one.lines.clear()
    broken = 0
    all_broken = anyio.Event()
    await at.mind.route(E0, incarnation + 1, dying.port)

    async def turn() -> None:
        nonlocal broken
        async with client.stream(PROMPT, params(TOKENS)) as pieces:
            async for piece in pieces:
                if piece.attempt == 0 and piece.start + len(piece.token_ids) == 10:
                    broken += 1
                    if broken == turns:
                        all_broken.set()

    with anyio.fail_after(WITHIN_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(turns):
                tasks.start_soon(turn)
            await all_broken.wait()
            await at.mind.fence(E0, incarnation + 1)
            await anyio.sleep(SETTLE_S)
            assert not client.addresses
            began_ms = time.time() * 1000.0
            await at.mind.route(E0, incarnation + 2, next_one.port)
        return [at_ms - began_ms for at_ms in await arrivals(next_one, turns)]


async def arrivals(stub: Stub, turns: int) -> list[float]:
    """When each generation was received, in Unix milliseconds."""
    while True:
        found = [
            float(match[1])
            for line in stub.lines
            if "/inference/v1/generate" in line and (match := re.search(r"time=(\d+)", line))
        ]
        if len(found) >= turns:
            return found
        await anyio.sleep(0.01)
