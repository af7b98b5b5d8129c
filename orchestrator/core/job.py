"""A job's state as the core sees it, and one step of it in the making."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from relight.events.decisions import Alarm, Decision, RouteFenced
from relight.events.facts import Fact
from relight.events.ids import DecisionId, EngineName, EntryId, NodeName, RecoveryId
from relight.events.schema import Command, EngineState, Meta
from relight.events.values import Phase
from relight.orchestrator.core.restraint import observes, withholds
from relight.orchestrator.settings import Settings

D = TypeVar("D", bound=Decision)
C = TypeVar("C", bound=Command)

ENDED_FOR_GOOD = frozenset({Phase.STOPPED, Phase.RETIRED})
"""Phases that only an operator ends."""


class Job(NamedTuple):
    """Everything that decisions depend on, besides the time."""

    epoch: int
    settings: Settings
    meta: Meta
    engines: Mapping[EngineName, EngineState]


class Step(NamedTuple):
    """What follows from one event. Commit the job's state and `decisions` together or not at all."""

    job: Job
    decisions: tuple[Decision | Fact, ...]


class Work:
    """One step in the making: a private copy of the job, and what was decided so far."""

    def __init__(self, job: Job, *, now: int, cause: EntryId | None = None) -> None:
        self.before = job
        self.epoch = job.epoch
        self.settings = job.settings
        self.meta = job.meta
        self.engines = dict(job.engines)
        self.now = now
        """Bus time in ms."""
        self.cause = cause
        self.decisions: list[Decision | Fact] = []

    def done(self) -> Step:
        return Step(Job(self.epoch, self.settings, self.meta, self.engines), tuple(self.decisions))

    def learn(self, **changes: Any) -> None:
        """Change fields of the job's meta."""
        self.meta = msgspec.structs.replace(self.meta, **changes)

    def put(self, name: EngineName, **changes: Any) -> EngineState:
        """Change fields of an engine's state."""
        engine = msgspec.structs.replace(self.engines[name], **changes)
        self.engines[name] = engine
        return engine

    def count(self, kind: str) -> None:
        counters = self.meta.counters
        self.learn(counters={**counters, kind: counters.get(kind, 0) + 1})

    def next_id(self) -> DecisionId:
        """An id for all time: epochs never repeat, and the serial only grows within one."""
        self.learn(serial=self.meta.serial + 1)
        return DecisionId(f"{self.epoch}-{self.meta.serial}")

    def decide(
        self, message: type[D], /, *, reason: str, recovery: RecoveryId | None = None, **fields: Any
    ) -> D:
        """Take a decision."""
        fields.setdefault("dry_run", observes(self.settings))
        decision = message(
            id=self.next_id(), epoch=self.epoch, reason=reason, cause=self.cause, recovery=recovery, **fields
        )
        self.decisions.append(decision)
        return decision

    def command(self, message: type[D], name: EngineName, /, *, reason: str, **fields: Any) -> D:
        """Take a decision about an engine's incarnation as it stands."""
        engine = self.engines[name]
        recovery = engine.recovery.id if engine.recovery else None
        return self.decide(
            message, reason=reason, recovery=recovery, engine=name, incarnation=engine.incarnation, **fields
        )

    def order(self, message: type[C], name: EngineName, /, *, reason: str, **fields: Any) -> None:
        """Take a decision about an engine that is its open step until it is answered."""
        dry = withholds(self.settings, self.meta, self.engines[name], message)
        self.put(name, intent=self.command(message, name, reason=reason, dry_run=dry, **fields))

    def alarm(self, kind: str, detail: str, *, reason: str) -> None:
        self.decide(Alarm, reason=reason, kind=kind, detail=detail)

    def fence(self, name: EngineName, *, reason: str, drain_s: float = 0.0, planned: bool = False) -> None:
        """Take away the engine's route, if it has one; `planned`: nothing has died there."""
        engine = self.engines[name]
        if engine.route is None:
            return
        self.command(
            RouteFenced,
            name,
            reason=reason,
            expected_s=engine.start_s,
            drain_s=drain_s,
            planned=planned,
        )
        self.put(name, route=None)

    def reported(self, node: NodeName) -> bool:
        """Whether the node has said what is true under this epoch, and still speaks."""
        record = self.meta.nodes.get(node)
        return record is not None and record.reported == self.epoch and not record.silent

    def told(self, engine: EngineState) -> bool:
        """Whether each node of the engine has said what is true under this epoch, and still speaks."""
        return all(self.reported(node) for node in engine.nodes)

    def after(self, seconds: float) -> int:
        """A deadline in bus time (ms). Doubled while the version is pinned by an evaluation or checkpoint."""
        boundary = self.meta.boundary
        pinned = boundary is not None and boundary.phase in ("eval", "checkpoint")
        return self.now + int(seconds * 1000) * (2 if pinned else 1)

    def serving(self) -> list[EngineName]:
        return [name for name, engine in self.engines.items() if engine.phase is Phase.SERVING]
