"""A job for measurements: bus, orchestrator and agent as processes of their own."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio
from benchmarks.recoveries import RELIGHT, running

from relight.events.bus.client import open_bus
from relight.events.bus.embedded import embedded
from relight.events.bus.follow import Decided, Follower
from relight.events.decisions import RouteAdded
from relight.events.ids import JobName

JOB = JobName("bench")
NODE = """
job = "bench"
node = "bench"
host = "127.0.0.1"
state_dir = "{root}/agent"
"""


@contextmanager
def job(root: Path, engines: str, *, names: int, within_s: float = 60.0) -> Generator[str]:
    """The bus's URL, once so many engines are routed on their base model."""
    (root / "node.toml").write_text(NODE.format(root=root) + engines)
    (root / "orchestrator.toml").write_text("[defaults]\nbackoff_s = 0.0\n")
    config = ["--config", str(root / "orchestrator.toml")]
    with embedded(root / "bus") as bus:
        url = bus.url
        decide = [*RELIGHT, "orchestrate", "--bus", url, "--job", JOB, *config]
        own = [*RELIGHT, "agent", "--bus", url, "--config", str(root / "node.toml"), "--stop-engines"]
        with running(decide, root / "orchestrator.log"), running(own, root / "agent.log"):
            anyio.run(_routed, url, names, within_s)
            yield url


async def _routed(url: str, names: int, within_s: float) -> None:
    seen: set[str] = set()
    async with open_bus(url) as bus:
        follower = Follower(bus.job(JOB))
        with anyio.fail_after(within_s):
            while len(seen) < names:
                match await follower.next():
                    case Decided(decision=RouteAdded() as route):
                        seen.add(route.engine)
                    case _:
                        pass


def stub(root: Path, name: str) -> str:
    """An `[[engines]]` table of a stub engine."""
    words = [sys.executable, "-m", "relight.agents.stub", "--model", f"{root}/base", "--host", "127.0.0.1"]
    command = ", ".join(f'"{word}"' for word in (*words, "--port", "{port}"))
    return f'[[engines]]\nname = "{name}"\ncommand = [{command}]\n'
