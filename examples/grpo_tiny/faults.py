"""The injector: SIGKILL to an engine, drawn by a seed: in which steps, when in them, which one, what of it.

The first kill of a run meets an engine in the middle of its generations; the others come at any moment.
"""

import os
import signal
from collections.abc import Callable
from typing import NamedTuple

import anyio
import numpy as np

from relight.agents.adapters import vllm
from relight.agents.node import pidfd
from relight.events.bus.follow import Follower
from relight.events.bus.job import JobBus
from relight.events.ids import EngineName
from relight.events.schema import EngineState
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.faults import core_of, server_of

STRIKE_S = 300.0
"""For an engine that can be struck: where none is up, one is on its way."""
FIRST, LAST = 0.1, 0.7
"""The part of a run in which is struck: before the steps whose rewards are compared."""
LOOK_S = 0.005


class Kill(NamedTuple):
    """What was done."""

    seed: int
    step: int
    """The step that went on at that moment."""
    engine: EngineName
    incarnation: int
    what: str


class Injector:
    """Draws the kills of one run of `steps` steps, and does them."""

    def __init__(self, job: JobBus, *, seed: int, steps: int, kills: int) -> None:
        self._job = job
        self._seed = seed
        self._draw = np.random.default_rng((seed, kills))
        within = np.arange(int(FIRST * steps), int(LAST * steps))
        self._after = sorted(map(int, self._draw.choice(within, size=kills, replace=False)))

    async def step_is_over(self, step: int, took_s: float, note: Callable[[Kill], None]) -> None:
        """Strike in the next step, which may take as long, where that was drawn; `note` what was done."""
        if step not in self._after:
            return
        at_work = step == self._after[0]
        if not at_work:
            await anyio.sleep(self._draw.uniform(0.0, took_s))
        with anyio.move_on_after(STRIKE_S):
            note(await self._strike(step + 1, at_work=at_work))
            return
        raise DemoFailed(f"no engine could be killed within {STRIKE_S:g} s")

    async def _strike(self, step: int, *, at_work: bool) -> Kill:
        """Kill one that is routed, and where `at_work` says so, one that generates at this moment."""
        follower = Follower(self._job)
        async with vllm.session() as http:
            while True:
                engines = (await self._job.snapshot()).engines
                routed = sorted(name for name, state in engines.items() if state.route is not None)
                if not routed:
                    await follower.next()
                    continue
                name = EngineName(str(self._draw.choice(routed)))
                what = str(self._draw.choice(["core", "server"]))
                struck = engines[name]
                if at_work and not await _generates(vllm.Client(http, struck.address or "")):
                    await anyio.sleep(LOOK_S)
                elif _kill(struck, what):
                    return Kill(self._seed, step, name, struck.incarnation, what)


async def _generates(engine: vllm.Client) -> bool:
    """Whether it says that requests run; one that does not answer is on its way out."""
    try:
        counters = await engine.counters(within_s=1.0)
    except vllm.EngineUnreachable:
        return False
    return counters is not None and counters.running > 0


def _kill(engine: EngineState, what: str) -> bool:
    """Whether that process was there to be killed."""
    try:
        fd = pidfd.hold(core_of(engine.processes) if what == "core" else server_of(engine.processes))
    except DemoFailed:
        return False
    if fd is None:
        return False
    try:
        return pidfd.send(fd, signal.SIGKILL)
    finally:
        os.close(fd)
