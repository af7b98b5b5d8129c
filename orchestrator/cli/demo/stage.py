"""What the scenes of the demo share: its plan and place, its services, the bus as it is read, the reports."""

from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from relight.events.bus.job import JobBus
from relight.events.facts import EngineStarted
from relight.events.ids import EngineName
from relight.orchestrator.cli.demo.bulletin import Bulletin
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.evidence import Injection, Kind, Look, Plan, Witness
from relight.orchestrator.cli.demo.inventory import Inventory
from relight.orchestrator.cli.demo.layout import Place
from relight.orchestrator.cli.demo.services import Services
from relight.orchestrator.cli.demo.trainee import Reports

START_S: dict[Kind, float] = {"stub": 60.0, "vllm": 400.0}
"""Longest wait for engines to be routed, the first time or again: vLLM starts in 25 s on 2 idle cores."""
TRAIN_S = 120.0
"""Longest wait for the trainer: it may import torch first."""
CANARY_S = 30.0
"""Longest wait for the canary that one engine runs aside at the new version."""
END_S = 60.0
"""Longest wait for the trainer's end."""


@dataclass(kw_only=True)
class Stage:
    """One demo under way."""

    plan: Plan
    place: Place
    say: Callable[[str], None]
    services: Services
    inventory: Inventory
    url: str
    job: JobBus
    http: aiohttp.ClientSession
    bulletin: Bulletin
    reports: Reports
    injections: list[Injection] = field(default_factory=list[Injection])
    before: tuple[Look, ...] = ()
    after: tuple[Look, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    sent_ms: float = 0.0
    """CLOCK_MONOTONIC at which both requests were last sent."""

    def started(self, name: EngineName, incarnation: int | None = None) -> EngineStarted:
        """How an incarnation was reported up: the newest one, or the one given; raises DemoFailed."""
        told = [fact for _, fact in self.bulletin.all(EngineStarted) if fact.engine == name]
        right = [fact for fact in told if incarnation in (None, fact.incarnation)]
        if not right:
            raise DemoFailed(f"no EngineStarted of {name} {incarnation or ''}")
        return right[-1]
