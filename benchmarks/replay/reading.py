"""The client against a bare reader of the same streams from the same stub, alternately, in one process."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

from benchmarks.replay.figures import Figure, ratio
from benchmarks.replay.rig import JOB, PROMPT, Wave, bare, params, plain_http, rig, wave
from tests.replay_job import E0

from relight.agents.replay.client import ReplayClient

BAR = 0.9
ROUNDS = 5
LOADS = ((64, 1000, 21), (1000, 400, ROUNDS))
"""Streams at once, tokens of each, and rounds: rollouts are long beside what a turn costs at its beginning.
A wave of the first takes a third of a second, in which the scheduler alone is worth a tenth."""
FLAGS = ("--token-interval-ms", "0", "--max-num-seqs", "2000", "--max-model-len", "100000")
"""The stub makes tokens as fast as it can: what a reader cannot take up slows it down."""


async def measure(root: Path) -> list[Figure]:
    figures: list[Figure] = []
    async with rig(root, *FLAGS, engines=1) as at:
        port = at.stubs[0].port
        await at.mind.route(E0, 1, port)
        async with ReplayClient(at.url, job=JOB) as client, plain_http() as http:
            for streams, tokens, count in LOADS:
                readers = (bare(http, port, tokens=tokens), ours(client, tokens))
                figures += compared(await rounds(readers, streams, count=count), streams)
    return figures


def ours(client: ReplayClient, tokens: int) -> Callable[[], Awaitable[int]]:
    async def read() -> int:
        turn = await client.generate(PROMPT, params(tokens))
        assert len(turn.attempts) == 1, turn.attempts
        return len(turn.token_ids)

    return read


async def rounds(
    readers: tuple[Callable[[], Awaitable[int]], Callable[[], Awaitable[int]]],
    streams: int,
    *,
    count: int = ROUNDS,
) -> list[tuple[Wave, Wave]]:
    """Both in turns, each second time the other one first; one round to warm up."""
    first, second = readers
    found: list[tuple[Wave, Wave]] = []
    for number in range(count + 1):
        if number % 2:
            other = await wave(second, streams)
            one = await wave(first, streams)
        else:
            one = await wave(first, streams)
            other = await wave(second, streams)
        found.append((one, other))
    return found[1:]


def compared(found: list[tuple[Wave, Wave]], streams: int) -> list[Figure]:
    return [
        Figure(f"bare reader, {streams} streams", median(one.tokens_s for one, _ in found), "tokens/s"),
        Figure(f"client, {streams} streams", median(other.tokens_s for _, other in found), "tokens/s"),
        Figure(f"bare reader, {streams} streams, CPU", median(one.cpu_us for one, _ in found), "us/token"),
        Figure(f"client, {streams} streams, CPU", median(other.cpu_us for _, other in found), "us/token"),
        Figure(
            f"client by bare reader, {streams} streams",
            ratio((one.tokens_s, other.tokens_s) for one, other in found),
            "",
            BAR,
        ),
    ]
