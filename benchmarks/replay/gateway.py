"""The gateway against going direct: the same streams by the same reader, in turns, in one run.

Tokens per second: stub engine, 64 streams at once, as fast as they come. Latency: a pacer that writes on each
token when it was sent, at the pace of a loaded GPU. The gateway is a process of its own, as it is in use.
`python -m benchmarks.replay.gateway` prints a table and one line; `measure` is what others call.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
from benchmarks.replay.figures import ratio
from benchmarks.replay.rig import LABEL
from benchmarks.replay.services import RELIGHT, running
from tests.replay_job import E0, JOB, Orchestrator, orchestrator

from relight.agents.stub.launch import launch, make_model
from relight.events.bus.embedded import embedded, free_port

STREAMS = 64
TOKENS = 1000
"""Each stream's, as many as the client's own figure has."""
SHORT_TOKENS = 100
"""For a figure of what answers cost at their beginnings, without a bar."""
ROUNDS = 15
"""Of each way, in turns, half a second each: the median ratio of two that follow each other counts."""

PACE_MS = 40.0
"""Between two tokens of one stream: 1,600 tokens a second in all, a batch of 64 on one GPU."""
PACED_TOKENS = 100

LEAST_RATIO = 0.7
MOST_ADDED_MS = 1.0

UP_S = 30.0


class Route(NamedTuple):
    """One endpoint and a body for it, which asks for so many tokens."""

    path: str
    tokens: int
    body: dict[str, Any]


class Ratio(NamedTuple):
    """Tokens per second of one endpoint, in medians, and the median of their ratios."""

    route: Route
    direct: float
    gateway: float
    value: float


class Figures(NamedTuple):
    """What one run found."""

    ratios: list[Ratio]
    short: Ratio
    """The same of short answers, on the last route."""
    direct_ms: float
    """From the engine's sending of a token to the reader's reading of it, median."""
    added_ms: float

    @property
    def good(self) -> bool:
        return min(each.value for each in self.ratios) >= LEAST_RATIO and self.added_ms <= MOST_ADDED_MS

    def lines(self) -> list[str]:
        """A table, and one line."""
        rows = [
            f"| `{each.route.path}` | {each.route.tokens:,} | {each.direct:,.0f} | {each.gateway:,.0f}"
            f" | {each.value:.2f} |"
            for each in (*self.ratios, self.short)
        ]
        least = min(each.value for each in self.ratios)
        told = (
            f"gateway: {least:.2f} of direct (bar {LEAST_RATIO}), {self.added_ms:+.2f} ms a token at p50"
            f" (bar {MOST_ADDED_MS}; direct {self.direct_ms:.2f} ms)"
        )
        head = f"| {STREAMS} streams | tokens of each | direct, tokens/s | gateway, tokens/s | ratio |"
        return [head, "|---|---|---|---|---|", *rows, told]


def routes(model: str, tokens: int = TOKENS) -> list[Route]:
    """Greedy streams of so many tokens."""
    common = {"model": model, "stream": True}
    text = {**common, "max_tokens": tokens, "temperature": 0}
    params = {"max_tokens": tokens, "temperature": 0.0, "logprobs": 0}
    return [
        Route("/v1/chat/completions", tokens, {**text, "messages": [{"role": "user", "content": "Hello"}]}),
        Route("/v1/completions", tokens, {**text, "prompt": "Hello", "logprobs": 0}),
        Route(
            "/inference/v1/generate", tokens, {**common, "token_ids": [5, 6, 7], "sampling_params": params}
        ),
    ]


async def measure(folder: Path) -> Figures:
    """One run, in a folder of its own; a minute."""
    model = make_model(folder / "model", seed=1)
    flags = ("--token-interval-ms", "0", "--max-model-len", "4096")
    with embedded(folder / "bus") as bus, launch(model, *flags) as stub, pacer() as paced:
        stub.post("/update_weight_version", {"new_version": LABEL})
        async with orchestrator(bus.url) as mind, aiohttp.ClientSession() as http:
            with gateway(bus.url, folder) as address:
                await _routed(mind, http, stub.port, incarnation=1, address=address)
                direct = f"http://127.0.0.1:{stub.port}"
                ratios = [await _ratio(http, direct, address, route) for route in routes(str(model))]
                brief = await _ratio(http, direct, address, routes(str(model), SHORT_TOKENS)[-1])
                alone, through = await _latencies(mind, http, paced, address)
    return Figures(ratios, brief, alone, through - alone)


@contextmanager
def gateway(bus: str, folder: Path) -> Generator[str]:
    """The command, as users start it."""
    port = free_port()
    command = (*RELIGHT, "gateway", "--bus", bus, "--job", JOB, "--port", str(port), "--drain", "1")
    with running(command, folder / "gateway.log"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def pacer() -> Generator[int]:
    """Its port."""
    command = (sys.executable, "-m", "benchmarks.replay.pacer", str(PACE_MS), str(PACED_TOKENS))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


async def _routed(
    mind: Orchestrator, http: aiohttp.ClientSession, port: int, *, incarnation: int, address: str
) -> None:
    await mind.route(E0, incarnation, port)
    with anyio.fail_after(UP_S):
        while True:
            try:
                async with http.get(f"{address}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await anyio.sleep(0.05)


async def _ratio(http: aiohttp.ClientSession, direct: str, gateway: str, route: Route) -> Ratio:
    ways = [direct, gateway]
    for where in ways:  # what is slow only once
        await _rate(http, where, route)
    rates: dict[str, list[float]] = {direct: [], gateway: []}
    for _ in range(ROUNDS):
        for where in ways:
            rates[where].append(await _rate(http, where, route))
        ways.reverse()
    here, there = rates[direct], rates[gateway]
    told = ratio(zip(here, there, strict=True))
    return Ratio(route, statistics.median(here), statistics.median(there), told)


async def _rate(http: aiohttp.ClientSession, address: str, route: Route) -> float:
    """Tokens per second of STREAMS streams at once, read as bytes."""

    async def stream() -> None:
        async with http.post(address + route.path, json=route.body) as answer:
            tail = b""
            async for data in answer.content.iter_any():
                tail = (tail + data)[-64:]
            assert answer.status == 200, tail
            assert tail.endswith(b"data: [DONE]\n\n"), tail

    begun = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(STREAMS):
            tasks.start_soon(stream)
    return STREAMS * route.tokens / (time.perf_counter() - begun)


async def _latencies(
    mind: Orchestrator, http: aiohttp.ClientSession, port: int, address: str
) -> tuple[float, float]:
    """Median milliseconds from sending to reading, direct and through the gateway."""
    await _routed(mind, http, port, incarnation=2, address=address)
    found: dict[str, list[float]] = {f"http://127.0.0.1:{port}": [], address: []}
    for _ in range(2):
        for where, seen in found.items():
            seen.extend(await _delays(http, where))
    direct, through = (statistics.median(each) for each in found.values())
    return direct, through


async def _delays(http: aiohttp.ClientSession, address: str) -> list[float]:
    seen: list[float] = []
    mark = b'"system_fingerprint":"'

    async def stream(number: int) -> None:
        await anyio.sleep(number * PACE_MS / STREAMS / 1000)  # a batch's streams are not all in one moment
        body = {"prompt": "x", "max_tokens": PACED_TOKENS, "stream": True}
        async with http.post(f"{address}/v1/completions", json=body) as answer:
            async for line in answer.content:
                now = time.monotonic_ns()
                if (place := line.find(mark)) >= 0:
                    begin = place + len(mark)
                    seen.append((now - int(line[begin : line.index(b'"', begin)])) / 1e6)

    async with anyio.create_task_group() as tasks:
        for number in range(STREAMS):
            tasks.start_soon(stream, number)
    assert len(seen) == STREAMS * PACED_TOKENS
    return seen


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        figures = anyio.run(measure, Path(folder))
    print("\n".join(figures.lines()))
    return 0 if figures.good else 1


if __name__ == "__main__":
    sys.exit(main())
