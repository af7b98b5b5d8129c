"""Who draws faults, and what they are made with.

A fault that lasts ends by itself, and all of them end when the fault-free tail begins.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING

from relight.events.ids import Source
from tests.simulate.kernel import Process
from tests.simulate.link import Link

if TYPE_CHECKING:
    from tests.simulate.agent import NodeAgent
    from tests.simulate.mind import Mind
    from tests.simulate.world import Job, World

OPERATOR = Source("operator/sim")
LONG_S = 5.0
"""A break that nobody can overlook."""
TRIES = 5
"""Occasions looked for before a moment passes without a fault."""

Fault = Callable[["Injector"], bool]
"""Makes a fault happen, and says whether it did."""


class Injector:
    """Draws faults from the plan's kinds until the tail begins."""

    def __init__(self, world: "World", faults: Mapping[str, Fault]) -> None:
        self.world = world
        self.random = Random(world.plan.seed * 2 + 2)
        self._ends: list[Callable[[], object]] = []
        """What is to be undone when the tail begins."""
        self._faults = faults

    def start(self) -> None:
        self.world.kernel.after(self._pause_s(), self._strike)

    def _pause_s(self) -> float:
        return self.random.expovariate(1.0 / self.world.plan.every_s)

    def _strike(self) -> None:
        if self.world.calm:
            return
        self.world.kernel.after(self._pause_s(), self._strike)
        for _ in range(TRIES):
            kind = self.random.choice(self.world.plan.kinds)
            if self._faults[kind](self):
                return

    def cease(self) -> None:
        """The tail begins: whatever lasts ends now."""
        self.world.calm = True
        for end in self._ends:
            end()
        for job in self.world.jobs:
            job.armed.clear()
            job.finishing = False
        for mind in self.world.minds:
            if mind.link is not None:
                mind.link.before = mind.link.behind = mind.link.delays = mind.link.deaf_to = None

    # --- how faults are made -----------------------------------------------------------------------

    def happened(self, kind: str, job: "Job | None", what: str) -> bool:
        self.world.count(kind)
        self.world.note(job.name if job is not None else "world", f"!  {kind} {what}")
        return True

    def last(self, seconds: float, end: Callable[[], object]) -> None:
        """Have `end` called after so long, or when the tail begins; once."""
        over: list[None] = []

        def once() -> None:
            if not over:
                over.append(None)
                end()

        self._ends.append(once)
        self.world.kernel.after(seconds, once)

    def a_job(self) -> "Job":
        return self.random.choice(self.world.jobs)

    def an_agent(self) -> "tuple[Job, NodeAgent]":
        job = self.a_job()
        return job, self.random.choice(job.agents)

    def a_mind(self) -> "Mind":
        return self.random.choice(self.world.minds)

    def freeze(self, process: Process | None, seconds: float) -> bool:
        if process is None or not process.alive or process.frozen:
            return False
        process.freeze()
        self.world.settle_pulses()

        def thaw() -> None:
            if process.alive:
                process.thaw()
                self._well_again(process, seconds)
            self.world.settle_pulses()

        self.last(seconds, thaw)
        return True

    def _well_again(self, process: Process, seconds: float) -> None:
        if seconds >= LONG_S:
            for link in self.world.network.links:
                if link.process is process:
                    link.well_since = self.world.kernel.now

    def cut(self, link: Link | None, seconds: float) -> bool:
        """No packet of that link comes through."""
        if link is None or link.cut or not link.process.alive:
            return False
        network = self.world.network
        link.cut = True
        self.world.settle_pulses()
        self.world.kernel.after(self.random.uniform(0.5, 2.5), network.reset, link)

        def heal() -> None:
            link.cut = False
            self._well_again(link.process, seconds)
            self.world.settle_pulses()

        self.last(seconds, heal)
        return True
