"""A job's ended recoveries and its alarms, counted from its decisions as they come. Pure.

Decision ids are unique for all time, so one that is read twice, as after a rollback of the bus, counts once.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from relight.events import codec
from relight.events.decisions import Alarm, RecoveryFinished
from relight.events.envelope import Entry
from relight.events.errors import Undecodable
from relight.events.ids import DecisionId, EngineName, EntryId, RecoveryId
from relight.events.values import Phases

TYPES = (RecoveryFinished.__name__, Alarm.__name__)
"""What is read of a job's decisions."""

RECOVERIES_KEPT, ALARMS_KEPT = 200, 100
"""The newest ones, that are shown one by one."""

IDS_KEPT = 20_000
"""More than a stream keeps entries."""

KINDS_MOST = 32
"""Kinds of alarms that are told apart; whatever stands on a bus, metrics stay few."""

PHASES = tuple(field.name for field in msgspec.structs.fields(Phases))
"""Of a recovery, in their order, and the total."""


class PastRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """One recovery that has ended."""

    id: RecoveryId | None
    engine: EngineName
    incarnation: int
    """The one that serves since, or was to."""
    outcome: str
    why: str
    phases: Phases
    time: int
    """Wall clock of the orchestrator in ms at its end, for people."""
    entry: EntryId
    dry_run: bool


class PastAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """One alarm."""

    kind: str
    detail: str
    reason: str
    time: int
    entry: EntryId


class Annals:
    """What was read of one job so far."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.took: dict[str, Counter[float]] = {}
        """Of each phase of those that are done: how often it took so many seconds, to three digits."""
        self.alarms: Counter[str] = Counter()
        self.recoveries: deque[PastRecovery] = deque(maxlen=RECOVERIES_KEPT)
        self.alarmed: deque[PastAlarm] = deque(maxlen=ALARMS_KEPT)
        self._known: dict[DecisionId, None] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Show these, and count those that were not counted yet. What cannot be decoded is left out."""
        for entry in entries:
            try:
                decision = codec.decode_decision(entry)
            except Undecodable:
                continue
            new = decision.id not in self._known
            self._remember(decision.id)
            match decision:
                case RecoveryFinished():
                    self._ended(entry, decision, new=new)
                case Alarm():
                    self._alarm(entry, decision, new=new)
                case _:
                    pass

    def forget_shown(self) -> None:
        """The bus holds another history now: what was counted stays, what is shown is read again."""
        self.recoveries.clear()
        self.alarmed.clear()

    def _remember(self, decision: DecisionId) -> None:
        self._known[decision] = None
        if len(self._known) > IDS_KEPT:
            del self._known[next(iter(self._known))]

    def _ended(self, entry: Entry, decision: RecoveryFinished, *, new: bool) -> None:
        if new:
            self._count(decision)
        self.recoveries.append(
            PastRecovery(
                id=decision.recovery,
                engine=decision.engine,
                incarnation=decision.incarnation,
                outcome=decision.outcome,
                why=decision.reason,
                phases=decision.phases,
                time=entry.time,
                entry=entry.entry_id,
                dry_run=decision.dry_run,
            )
        )

    def _count(self, decision: RecoveryFinished) -> None:
        self.outcomes[decision.outcome] += 1
        spent: dict[str, Any] = msgspec.structs.asdict(decision.phases)
        for phase, took_ms in spent.items():
            if took_ms is not None and decision.outcome == "done":
                seconds = float(f"{took_ms / 1000.0:.3g}")
                self.took.setdefault(phase, Counter())[seconds] += 1

    def _alarm(self, entry: Entry, decision: Alarm, *, new: bool) -> None:
        known = decision.kind in self.alarms or len(self.alarms) < KINDS_MOST
        self.alarms[decision.kind if known else "other"] += new
        self.alarmed.append(
            PastAlarm(
                kind=decision.kind,
                detail=decision.detail,
                reason=decision.reason,
                time=entry.time,
                entry=entry.entry_id,
            )
        )
