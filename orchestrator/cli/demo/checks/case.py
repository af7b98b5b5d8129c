"""The evidence with its entries decoded, and the shape of a check. Pure: nothing here looks at anything.

`Case` names what all checks speak of: the incarnation that died, the one that replaced it, and the part of
the streams from the fault on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from relight.events import codec
from relight.events.bus.streams import position
from relight.events.decisions import Decision, ForEngine, RecoveryFinished
from relight.events.envelope import Entry
from relight.events.errors import Undecodable
from relight.events.facts import EngineStarted, Fact, OfEngine
from relight.events.ids import BEGINNING, EntryId
from relight.events.values import Member
from relight.events.version import Version
from relight.orchestrator.cli.demo.evidence import Evidence, Look, Mode, Request, Turn

GENERATE = "/inference/v1/generate"
"""The route as clients call it; everybody else of relight's adds a query that says who asks."""

M = TypeVar("M", bound=Fact | Decision)


class Slot(NamedTuple):
    """One incarnation of one engine."""

    engine: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.engine}.{self.incarnation}"


class Verdict(NamedTuple):
    """What a check found."""

    passed: bool
    detail: str


class Case:
    """Evidence, decoded once."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.plan = evidence.plan
        self.fault = evidence.injections[-1]
        self.dead = Slot(self.fault.engine, self.fault.incarnation)
        self.replacement = Slot(self.fault.engine, self.fault.incarnation + 1)
        self.survivors = tuple(name for name in self.plan.engines if name != self.fault.engine)
        self.version = Version(evidence.trainer.run, 1)
        self.undecodable: list[str] = []
        self.facts = list(self._decoded(evidence.facts))
        self.decisions = list(self._decoded(evidence.decisions))

    def _decoded(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Fact | Decision]]:
        for entry in entries:
            try:
                fact = codec.is_fact(entry)
                yield entry, codec.decode_fact(entry) if fact else codec.decode_decision(entry)
            except Undecodable as error:
                self.undecodable.append(str(error))

    def told(
        self, kind: type[M], slot: Slot | None = None, *, after: EntryId = BEGINNING
    ) -> list[tuple[Entry, M]]:
        """Messages of one type, in order: about `slot` where one is given, later than `after`."""
        return [
            (entry, message)
            for entry, message in (*self.facts, *self.decisions)
            if isinstance(message, kind)
            and later(entry, after)
            and (slot is None or slot_of(message) == slot)
        ]

    def decided(self, kind: type[M], slot: Slot | None = None) -> list[tuple[Entry, M]]:
        """Decisions of one type from the fault on."""
        return self.told(kind, slot, after=self.fault.decisions)

    @property
    def recovered(self) -> Entry | None:
        """The record of the recovery from the fault."""
        return next((entry for entry, _ in self.decided(RecoveryFinished)), None)

    def meanwhile(self, kind: type[M]) -> list[M]:
        """Decisions of one type from the fault to the end of the recovery."""
        end = self.recovered
        return [told for entry, told in self.decided(kind) if end is None or not later(entry, end.entry_id)]

    def happened(self, kind: type[M], slot: Slot | None = None) -> list[tuple[Entry, M]]:
        """Facts of one type from the fault on."""
        return self.told(kind, slot, after=self.fault.facts)

    def turn(self, mode: Mode) -> Turn:
        """The turn of that mode; an empty one where none returned."""
        empty = Turn(mode=mode, token_ids=(), logprobs=(), finish_reason=None, versions=(), attempts=())
        return next((turn for turn in self.evidence.turns if turn.mode == mode), empty)

    def client_requests(self, slot: Slot | None = None, *, since_ms: int = 0) -> list[Request]:
        """Generations that clients asked for, by the engines' access logs."""
        return [
            request
            for request in self.evidence.requests
            if (request.method, request.path) == ("POST", GENERATE)
            and request.time_ms >= since_ms
            and (slot is None or (request.engine, request.incarnation) == slot)
        ]

    def look(self, looks: Sequence[Look], slot: Slot) -> Look | None:
        """What was seen of one incarnation."""
        return next((look for look in looks if (look.engine, look.incarnation) == slot), None)

    def started(self, slot: Slot) -> EngineStarted | None:
        """How that incarnation was reported up."""
        return next((fact for _, fact in self.told(EngineStarted, slot)), None)


def at_boundary(case: Case) -> bool:
    """Whether the weights come from the trainer's boundary."""
    return case.plan.recover_at == "boundary"


def from_snapshot(case: Case) -> bool:
    """Whether the weights come from the published snapshot."""
    return case.plan.recover_at == "snapshot"


def later(entry: Entry, than: EntryId) -> bool:
    """Whether an entry stands behind a position of the bus."""
    return position(entry.entry_id) > position(than)


def slot_of(message: Fact | Decision) -> Slot | None:
    """The incarnation that a message is about."""
    if isinstance(message, (ForEngine, OfEngine)):
        return Slot(message.engine, message.incarnation)
    return None


def slot_of_member(member: Member) -> Slot:
    """The incarnation that a sync names."""
    return Slot(member.engine, member.incarnation)


class Check(NamedTuple):
    """One named property of the evidence."""

    name: str
    judge: Callable[[Case], Verdict]
    applies: Callable[[Case], bool] = lambda _: True


def verdict(wrong: Sequence[str], right: str) -> Verdict:
    """Passed where nothing is wrong; `right` says what was found then."""
    return Verdict(not wrong, "; ".join(wrong) if wrong else right)
