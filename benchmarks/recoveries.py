"""How long a recovery takes without the engine's own start: kills a stub engine's core again and again.

Everything is real but the engine: an embedded bus, an orchestrator, a node agent and a trainer, each a
process of its own, and a process tree whose core gets SIGKILL. Prints the phases' medians in milliseconds
and one line of figures; exits 1 when the median of all phases but `start` is over the bar.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import numpy as np
from benchmarks import ending
from safetensors.numpy import save_file

from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import embedded
from relight.events.bus.follow import Decided, Follower
from relight.events.bus.job import JobBus
from relight.events.decisions import Decision, RecoveryFinished, RouteAdded
from relight.events.facts import EngineStarted
from relight.events.ids import BEGINNING, JobName
from relight.events.values import Phases
from relight.orchestrator.cli.demo.faults import core_of

BAR_MS = 150.0
"""All phases but `start`, in the median, on 2 cores."""
WITHIN_S = 60.0
JOB = JobName("bench")
NODE = """
job = "bench"
node = "bench"
state_dir = "{root}/agent"
[[engines]]
name = "engine-0"
kind = "vllm"
command = ["{python}", "-m", "relight.agents.stub", "--model", "{root}/model", "--port", "{{port}}"]
"""
RELIGHT = [sys.executable, "-m", "relight.orchestrator.cli"]
D = TypeVar("D", bound=Decision)


@contextmanager
def running(command: list[str], log: Path) -> Generator["subprocess.Popen[bytes]"]:
    """One service for the length of the block, stopped by SIGTERM."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=WITHIN_S)


async def hear(heard: Follower, kind: type[D]) -> D:
    """The next decision of `kind`."""
    with anyio.fail_after(WITHIN_S):
        while True:
            event = await heard.next()
            if isinstance(event, Decided) and isinstance(event.decision, kind):
                return event.decision


async def recoveries(url: str, times: int) -> list[Phases]:
    """Kill the core of whatever incarnation is routed, `times` times; the phases of each recovery."""
    async with open_bus(url) as bus:
        job = bus.job(JOB)
        heard = Follower(job)
        found: list[Phases] = []
        for _ in range(times):
            os.kill(core_of((await newest_start(job)).processes).pid, signal.SIGKILL)
            found.append((await hear(heard, RecoveryFinished)).phases)
            print(f"  {len(found):3d} of {times}: {_rest(found[-1]):6.1f} ms and the start", file=sys.stderr)
        return found


async def newest_start(job: JobBus) -> EngineStarted:
    """How the routed incarnation was reported up."""
    entries = [
        entry for entry in await job.read_facts(BEGINNING, count=100_000) if entry.type == "EngineStarted"
    ]
    fact = codec.decode_fact(entries[-1])
    assert isinstance(fact, EngineStarted)
    return fact


async def routed(url: str) -> None:
    """Return once the engine is routed for the first time."""
    async with open_bus(url) as bus:
        await hear(Follower(bus.job(JOB)), RouteAdded)


def measure(root: Path, times: int) -> list[Phases]:
    (root / "model").mkdir()
    save_file({"model.weight": np.zeros((64, 64), dtype=np.float32)}, root / "model" / "model.safetensors")
    (root / "node.toml").write_text(NODE.format(root=root, python=sys.executable))
    (root / "orchestrator.toml").write_text(
        f"[defaults]\nrecover_at = 'boundary'\nbackoff_s = 0.0\nrestarts = {times + 1}\n"
    )
    with ExitStack() as stack:
        url = stack.enter_context(embedded(root / "bus")).url
        config = ["--config", str(root / "orchestrator.toml")]
        stack.enter_context(
            running([*RELIGHT, "orchestrate", "--bus", url, "--job", JOB, *config], root / "o.log")
        )
        agent = [*RELIGHT, "agent", "--bus", url, "--config", str(root / "node.toml"), "--stop-engines"]
        stack.enter_context(running(agent, root / "a.log"))
        anyio.run(routed, url)
        script = str(Path(__file__).with_name("waiting_trainer.py"))
        command = [sys.executable, script, url, JOB, str(root / "weights")]
        trainer = stack.enter_context(running(command, root / "t.log"))
        assert trainer.stdout is not None
        if trainer.stdout.readline() != b"waiting\n":
            raise SystemExit(f"the trainer did not sync: {(root / 't.log').read_text()}")
        return anyio.run(recoveries, url, times)


def _rest(phases: Phases) -> float:
    """Milliseconds of all phases but the start."""
    return (phases.total or 0.0) - (phases.start or 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="recoveries (20)")
    times = parser.parse_args().times
    ending.on_sigterm()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as directory:
        found = measure(Path(directory), times)
    print(f"{'phase':10} {'median':>8} {'largest':>8}   ms of {times} recoveries")
    for field in msgspec.structs.fields(Phases):
        spent = [value for phases in found if (value := getattr(phases, field.name)) is not None]
        if spent:
            print(f"{field.name:10} {statistics.median(spent):8.1f} {max(spent):8.1f}")
    median = statistics.median(_rest(phases) for phases in found)
    passed = median <= BAR_MS
    print(
        f"recoveries: all phases but start {median:.1f} ms in the median of {times}, bar {BAR_MS:g}: "
        f"{'met' if passed else 'MISSED'}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
