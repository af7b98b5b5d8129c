"""What the node agent costs and how fast it judges: `python -m benchmarks.agent`.

Everything is real but the engines, which are stub process trees: an embedded bus with an append-only file,
`relight agent` as a process of its own, and this program as its orchestrator. Prints the figures and one
line of them; exits 1 when a bar is missed.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
from benchmarks import ending
from benchmarks.agent_rig import Rig, node
from tests.node_support import generating, kill, knobs, role

from relight.events.facts import EngineDead, EngineStopped

IDLE_ENGINES, IDLE_S = 8, 45.0
"""Longer than one round of an agent's looks at all processes, which is half a minute."""
BUSY_ENGINES, BUSY_STALL_S, BUSY_CALLS = 3, 1.0, 4
LATE_S = 30.0
"""Longest delay of a probe in the busy run: far above its stall window."""


class Figure(NamedTuple):
    """One measured value and its bar."""

    name: str
    value: float
    bar: float
    unit: str

    @property
    def met(self) -> bool:
        return self.value <= self.bar

    def __str__(self) -> str:
        return f"{self.name} {self.value:.1f} {self.unit} (bar {self.bar:g})"


async def idle(rig: Rig) -> list[Figure]:
    """The agent's share of one core while engines serve and nobody calls them."""
    await rig.fill(list(rig.incarnations))
    await anyio.sleep(2)
    used, began = rig.cpu_s(), anyio.current_time()
    await anyio.sleep(IDLE_S)
    share = (rig.cpu_s() - used) / (anyio.current_time() - began)
    return [Figure(f"idle with {IDLE_ENGINES} engines", 100.0 * share, 3.0, "% of a core")]


async def deaths(rig: Rig, times: int) -> list[Figure]:
    """From SIGKILL of a process to EngineDead, and to EngineStopped, as a reader of the bus sees them."""
    chance = random.Random(1)
    names = list(rig.incarnations)
    await rig.fill(names)
    told: list[float] = []
    gone: list[float] = []
    for number in range(times):
        name = chance.choice(names)
        victim = role(rig.file, chance.choice(("leader", "core", "worker")), name)
        began = anyio.current_time()
        kill(victim)
        dead = await rig.player.wait(EngineDead)
        told.append((anyio.current_time() - began) * 1000.0)
        assert (dead.engine, dead.incarnation) == (name, rig.incarnations[name]), dead
        order = rig.player.stop(rig.incarnations[name], engine=name)
        stopped = await rig.player.ask(EngineStopped, order)
        gone.append((anyio.current_time() - began) * 1000.0)
        assert len(stopped.proof.processes) >= 3
        await rig.fill([name])
        if (number + 1) % 20 == 0:
            print(f"  {number + 1} of {times} deaths", file=sys.stderr)
    _table({"kill to EngineDead": told, "kill to EngineStopped": gone})
    return [
        Figure("death told p50", statistics.median(told), 10.0, "ms"),
        Figure("p99", _percentile(told, 99), 50.0, "ms"),
        Figure("kill to proof p50", statistics.median(gone), 100.0, "ms"),
    ]


async def busy(rig: Rig, seconds: float) -> list[Figure]:
    """False deaths while calls run without a pause and every probe is late by a random time."""
    await rig.fill(list(rig.incarnations))
    chance = random.Random(2)
    deadline = anyio.current_time() + seconds
    delays = 0

    async def load(name: str) -> None:
        started = rig.started[name]  # type: ignore[index]
        while True:
            async with generating(started, tokens=90_000):  # never done: there is always work
                await anyio.sleep(chance.uniform(2.0, 3.0))

    async with anyio.create_task_group() as tasks:
        for name in rig.incarnations:
            for _ in range(BUSY_CALLS):
                tasks.start_soon(load, name)
        while anyio.current_time() < deadline:
            for started in rig.started.values():
                await knobs(started, probe_delay_s=chance.choice((0.0, chance.uniform(0.0, LATE_S))))
                delays += 1
            await anyio.sleep(chance.uniform(0.5, 3.0))
        with anyio.move_on_after(2):  # under load to the end: an idle engine that answers late is dead
            await rig.player.wait(EngineDead)
        tasks.cancel_scope.cancel()
    dead = rig.player.seen(EngineDead)
    false = len(dead)
    for each in dead:
        print(f"false death of {each.engine}: {each.detail.splitlines()[0]}")
    print(f"busy run: {seconds:.0f} s, {delays} changes of the probes' delay, {false} false deaths")
    return [Figure("false deaths", false, 0, f"in {seconds:.0f} s")]


def _percentile(values: Sequence[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


def _table(measured: dict[str, list[float]]) -> None:
    print(f"{'ms':24} {'p50':>7} {'p90':>7} {'p99':>7} {'largest':>8}")
    for name, values in measured.items():
        shown = (statistics.median(values), _percentile(values, 90), _percentile(values, 99), max(values))
        print(f"{name:24} {shown[0]:7.1f} {shown[1]:7.1f} {shown[2]:7.1f} {shown[3]:8.1f}   n={len(values)}")


async def measure(root: Path, *, engines: int, times: int, busy_s: float) -> list[Figure]:
    found: list[Figure] = []
    async with node(root / "idle", engines=IDLE_ENGINES) as rig:
        found += await idle(rig)
    async with node(root / "busy", engines=BUSY_ENGINES, stall_s=BUSY_STALL_S) as rig:
        found += await busy(rig, busy_s)
    async with node(root / "deaths", engines=engines) as rig:
        found += await deaths(rig, times)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=50, help="on the node whose deaths are measured (50)")
    parser.add_argument("--deaths", type=int, default=200, help="that are measured (200)")
    parser.add_argument("--busy-s", type=float, default=120.0, help="length of the busy run (120)")
    parser.add_argument("--long", action="store_true", help="a busy run of one hour")
    args = parser.parse_args()
    busy_s = 3600.0 if args.long else args.busy_s
    ending.on_sigterm()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as folder:

        async def run() -> list[Figure]:
            return await measure(Path(folder), engines=args.engines, times=args.deaths, busy_s=busy_s)

        found = anyio.run(run)
    passed = all(figure.met for figure in found)
    figures = ", ".join(map(str, found))
    print(f"agent, {args.engines} engines, {args.deaths} deaths: {figures}: {'met' if passed else 'MISSED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
