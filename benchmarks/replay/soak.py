"""A thousand streams at once while their engines are killed at random; every turn must equal its reference.

Everything is real but the model: an embedded bus, an orchestrator and a node agent as processes of their own,
and stub engines whose tokens follow from their weights, so that one token that is lost, doubled, re-scored or
given to another turn shows. Half of the killed engines lose their core, some their server, some freeze. Ends
with one line of figures; exits 1 when a bar is missed.
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from benchmarks import ending
from benchmarks.replay.services import RELIGHT, running

from relight.agents.replay.client import ReplayClient
from relight.agents.replay.turn import ReplayError, Turn
from relight.agents.stub.launch import make_model
from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import embedded
from relight.events.bus.job import JobBus
from relight.events.ids import JobName
from relight.events.schema import EngineState
from relight.events.values import Phase
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.faults import core_of, server_of

JOB = JobName("soak")
ENGINES = 4
TOKEN_MS = 200.0
"""A thousand streams then bring 5,000 tokens a second, each in a chunk of its own: what two cores serve."""
LENGTHS = (20, 100)
KILL_EVERY_S = (2.0, 5.0)
FAULTS = ("core", "core", "core", "server", "server", "freeze")
SETTLE_S = 180.0
"""After the last kill: until every turn has ended."""
ROUTED_S = 60.0
DESCRIPTORS = 8192
"""One for each stream, at both of its ends."""

NODE = 'job = "soak"\nnode = "soak"\nstate_dir = "{root}/agent"\n'
ENGINE = """
[[engines]]
name = "engine-{number}"
stall_s = 5.0
grace_s = 1.0
command = ["{python}", "-m", "relight.agents.stub", "--model", "{root}/model", "--port", "{{port}}",
           "--token-interval-ms", "{token_ms}", "--max-num-seqs", "2000"]
"""
SETTINGS = "[defaults]\nbackoff_s = 0.0\nrestarts = 100000\nnode_silence_s = 60.0\nstop_s = 60.0\n"


class Wrong(NamedTuple):
    """What no turn may show."""

    unequal: int = 0
    """Complete turns whose tokens or logprobs differ from the reference."""
    lost: int = 0
    """Tokens of the reference that a turn lacks."""
    doubled: int = 0
    """Tokens that were delivered twice without a word that what stood there is void."""
    failed: int = 0
    """Turns that ended with an error."""


class Tally:
    """What was seen."""

    def __init__(self) -> None:
        self.turns = 0
        self.wrong = Wrong()
        self.kills: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.under_way = self.least = 0

    def add(self, **more: int) -> None:
        counted = {name: getattr(self.wrong, name) + count for name, count in more.items()}
        self.wrong = self.wrong._replace(**counted)


class Soak:
    """The streams and the killer."""

    def __init__(self, clients: Sequence[ReplayClient], digest: str, seed: int) -> None:
        self.tally = Tally()
        self.over = False
        self._clients = clients
        self._digest = digest
        self._seed = seed

    async def stream(self, number: int) -> None:
        """One caller: turn after turn until the end."""
        draw = random.Random(f"{self._seed}/{number}")
        await anyio.sleep(draw.uniform(0.0, 2.0))
        while not self.over:
            prompt = [draw.randrange(512) for _ in range(draw.randint(4, 24))]
            await self._turn(draw.choice(self._clients), prompt, draw.randint(*LENGTHS))

    async def _turn(self, client: ReplayClient, prompt: list[int], length: int) -> None:
        received: list[int] = []
        params = {"max_tokens": length, "temperature": 0.0, "logprobs": 0}
        try:
            async with client.stream(prompt, params) as pieces:
                async for piece in pieces:
                    if piece.start < len(received):
                        if piece.start != 0:
                            self.tally.add(doubled=len(received) - piece.start)
                        del received[piece.start :]
                    elif piece.start > len(received):
                        self.tally.add(lost=piece.start - len(received))
                    received += piece.token_ids
                turn = pieces.turn
        except ReplayError as error:
            self.tally.add(failed=1)
            self.tally.errors[str(error)[:200]] += 1
            return
        self._judge(turn, received, reference(self._digest, prompt, length))

    def _judge(self, turn: Turn, received: list[int], right: tuple[list[int], list[float]]) -> None:
        ids, logprobs = right
        self.tally.turns += 1
        equal = turn.complete and (turn.token_ids, turn.logprobs) == (ids, logprobs) and received == ids
        if not equal:
            self.tally.add(unequal=1, lost=max(0, len(ids) - len(turn.token_ids)))


async def kill(job: JobBus, soak: Soak, draw: random.Random) -> None:
    """Strike one routed engine after another until the end."""
    while not soak.over:
        await anyio.sleep(draw.uniform(*KILL_EVERY_S))
        engines = (await job.snapshot()).engines
        routed = [state for state in engines.values() if state.route is not None]
        if not soak.over and len(routed) > 1:
            fault = draw.choice(FAULTS)
            if _strike(draw.choice(routed), fault):
                soak.tally.kills[fault] += 1


def _strike(state: EngineState, fault: str) -> bool:
    """Whether the process was still there to be struck."""
    try:
        process = server_of(state.processes) if fault == "server" else core_of(state.processes)
        os.kill(process.pid, signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)
    except (DemoFailed, ProcessLookupError):
        return False
    return True


async def routed(job: JobBus) -> None:
    """Return when every engine is."""
    with anyio.fail_after(ROUTED_S):
        while True:
            engines = (await job.snapshot()).engines
            serving = [state for state in engines.values() if state.phase is Phase.SERVING]
            if len(serving) == ENGINES:
                return
            await anyio.sleep(0.1)


async def play(
    url: str, digest: str, *, streams: int, seconds: float, seed: int
) -> tuple[Soak, dict[str, Any]]:
    """All of it."""
    async with AsyncExitStack() as stack:
        job = (await stack.enter_async_context(open_bus(url))).job(JOB)
        await routed(job)
        clients = [
            await stack.enter_async_context(ReplayClient(url, job=JOB, mode=mode, max_engine_failures=1000))
            for mode in ("continue", "continue", "restart")
        ]
        soak = Soak(clients, digest, seed)
        with anyio.fail_after(seconds + SETTLE_S):
            async with anyio.create_task_group() as tasks:
                for number in range(streams):
                    tasks.start_soon(soak.stream, number)
                tasks.start_soon(kill, job, soak, random.Random(seed))
                tasks.start_soon(report, soak, clients)
                await anyio.sleep(seconds)
                soak.over = True
        told = [client.numbers() for client in clients]
        return soak, {
            name: sum(each[name] for each in told)
            for name in (
                "turns_interrupted",
                "turns_suspect",
                "tokens",
                "tokens_kept",
                "tokens_regenerated",
                "replays",
            )
        }


async def report(soak: Soak, clients: Sequence[ReplayClient]) -> None:
    """A line of progress now and then."""
    while not soak.over:
        await anyio.sleep(10)
        tally = soak.tally
        routes = len(clients[0].addresses)
        print(f"  {tally.turns} turns, {tally.kills.total()} kills, {routes} routes", file=sys.stderr)


def line(soak: Soak, told: dict[str, Any], *, streams: int, took_s: float, seed: int) -> tuple[str, bool]:
    """The one line of figures, and whether every bar is met."""
    tally, wrong = soak.tally, soak.tally.wrong
    met = wrong == Wrong() and tally.kills.total() > 0 and told["turns_interrupted"] > 0
    kills = ", ".join(f"{fault} {count}" for fault, count in sorted(tally.kills.items()))
    parts = (
        f"{streams} streams, {took_s:.0f} s, seed {seed}: {tally.kills.total()} kills ({kills})",
        (
            f"{tally.turns} turns, {wrong.unequal} unequal, {wrong.failed} failed, {wrong.lost} tokens lost,"
            f" {wrong.doubled} doubled"
        ),
        f"{told['turns_interrupted']} interrupted, {told['turns_suspect']} of them by two deaths or more",
        f"{told['tokens']} tokens, {told['tokens_kept']} kept, {told['tokens_regenerated']} regenerated",
    )
    return f"soak-replay: {'; '.join(parts)}: {'met' if met else 'MISSED'}", met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="of kills (75)")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))
    ending.on_sigterm()
    with tempfile.TemporaryDirectory(prefix="relight-soak-") as directory, ExitStack() as stack:
        root = Path(directory)
        model = make_model(root / "model", seed=1)
        tables = [
            ENGINE.format(root=root, number=number, python=sys.executable, token_ms=TOKEN_MS)
            for number in range(ENGINES)
        ]
        (root / "node.toml").write_text(NODE.format(root=root) + "".join(tables))
        (root / "orchestrator.toml").write_text(SETTINGS)
        url = stack.enter_context(embedded(root / "bus")).url
        config = ["--config", str(root / "orchestrator.toml")]
        stack.enter_context(
            running([*RELIGHT, "orchestrate", "--bus", url, "--job", JOB, *config], root / "o.log")
        )
        agent = [*RELIGHT, "agent", "--bus", url, "--config", str(root / "node.toml"), "--stop-engines"]
        stack.enter_context(running(agent, root / "a.log"))
        began = time.monotonic()

        async def run() -> tuple[Soak, dict[str, Any]]:
            return await play(
                url, weights_digest(model), streams=args.streams, seconds=args.seconds, seed=args.seed
            )

        soak, told = anyio.run(run)
        took_s = time.monotonic() - began
    for error, count in soak.tally.errors.most_common(5):
        print(f"  {count} times: {error}", file=sys.stderr)
    text, met = line(soak, told, streams=args.streams, took_s=took_s, seed=args.seed)
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
