"""A lease as this process holds it, and what is seen of the job meanwhile.

Invariant: it is valid until a moment of this process's monotonic clock that counts from before the last
renewal was sent, so it ends here before it ends on the bus, whatever was slow in between. Whoever decides
asks `check` first; whoever learns that it is over calls `end`, which cancels what runs under it.
"""

import time
from typing import NamedTuple

import anyio

from relight.events.bus.job import Lease, Pulse
from relight.events.bus.roll import Held, Looked
from relight.events.errors import LostLease
from relight.events.ids import BEGINNING, EntryId, JobName, Source
from relight.orchestrator.core.job import Job
from relight.orchestrator.settings import Settings
from relight.orchestrator.sources import Sources

MARGIN_S = 0.3
"""A holder stops this long before its lease ends: longer than a commit takes."""

LOOK_S = 1.0
"""How often pulses are looked at, at least."""

STALL_S = 3.0
"""A longer pause between two looks was a stall of our own: everybody gets a fresh grace period."""

TRIM_S = 10.0
"""How often the streams are trimmed: what 10 s can add is small against what is kept."""

FORGET_S = 60.0
"""How often sources that are gone for good are looked for."""


class Sight(NamedTuple):
    """The signs of life of one look, for whoever judges silence by them."""

    pulses: dict[Source, Pulse] | None
    """None: nobody has looked since."""
    at_s: float
    """When (monotonic)."""
    blind: bool
    """Whether there was a stall or an outage before this look."""


class Committed(NamedTuple):
    """How far the job has come."""

    number: int = 0
    cursor: EntryId = BEGINNING


class Tenure:
    """One job's lease under one epoch. `scope` holds what runs under it."""

    def __init__(
        self, job: JobName, lease: Lease, settings: Settings, *, stamp: str, asked_at_s: float
    ) -> None:
        self.job = job
        self.lease = lease
        self.settings = settings
        self.stamp = stamp
        """The server that gave the lease."""
        self.scope = anyio.CancelScope()
        self.over: str | None = None
        """Why it ended, once it has."""
        self.stands: Job | None = None
        """The job as it was last committed."""
        self.committed = Committed()
        self.anchor = BEGINNING
        """A cursor of a while ago whose fact has stood in the stream since. Where it is gone, the stream was
        deleted or evicted, and others may have stood behind it."""
        self._gone = BEGINNING
        """A cursor whose fact may be gone already, and is missed by nobody: the one that the term began with,
        or one that was trimmed."""
        self.sources = Sources()
        self.every_s = min(LOOK_S, settings.lease_s / 3.0)
        self.look_at_s = asked_at_s + self.every_s
        self.trim_at_s = self.forget_at_s = (
            asked_at_s  # with the first look, or terms that end soon never would
        )
        self.renewed_at_s = asked_at_s
        self._until_s = 0.0
        self._looked_at_s = asked_at_s
        self._pulses: dict[Source, Pulse] | None = None
        self._blind = False
        self.renewed(asked_at_s=asked_at_s)

    def renewed(self, *, asked_at_s: float) -> None:
        """The renewal that was sent at `asked_at_s` (monotonic) was granted."""
        self.renewed_at_s = asked_at_s
        self._until_s = asked_at_s + self.settings.lease_s - MARGIN_S

    def check(self) -> None:
        """Raise LostLease where nothing may be decided any more."""
        if self.over is None and time.monotonic() >= self._until_s:
            self.end("it could not be renewed")
        if self.over is not None:
            raise LostLease(f"job {self.job}: the lease of epoch {self.lease.epoch} is over: {self.over}")

    def expire(self, now_s: float) -> None:
        """End it where it has run out."""
        if self.over is None and now_s >= self._until_s:
            self.end("it could not be renewed")

    def begins(self, committed: Committed) -> None:
        """The term begins with the state as it was committed by others."""
        self.committed = committed
        self._gone = committed.cursor

    def advanced(self, committed: Committed) -> None:
        """The term has committed."""
        self.committed = committed
        if self.anchor == BEGINNING and committed.cursor != self._gone:
            self.anchor = committed.cursor

    def compare(self, before: Committed, asked: Held, look: Looked) -> None:
        """End it where the bus has lost what was committed `before` the look, or facts that nobody may have
        read: a new term asks everybody what is true. The server may be the same, emptied or evicting.
        """
        if look.commit is not None and look.commit < before.number:
            self.end(f"the state was at commit {before.number} and is at {look.commit}")
        elif look.has_anchor is False and asked.anchor != BEGINNING:
            self.end("facts are gone from the bus")
        if look.has_cursor is not None:  # a trim is no loss
            self._gone = BEGINNING if look.has_cursor else before.cursor
        self.anchor = before.cursor if before.cursor != self._gone else BEGINNING

    def end(self, why: str) -> None:
        """It is over; the first reason counts."""
        if self.over is None:
            self.over = why
            self.scope.cancel()

    # --- signs of life, from whoever looks to whoever judges ---------------------------------------

    def saw(self, pulses: dict[Source, Pulse], *, now_s: float) -> None:
        """The job's pulses as they stood at `now_s` (monotonic)."""
        self._blind |= now_s - self._looked_at_s > STALL_S
        self._looked_at_s = now_s
        self._pulses = pulses

    def saw_nothing(self) -> None:
        """The bus was away: what stood still meanwhile may have been our own blindness, and what was seen
        before it is no moment to count from."""
        self._blind = True
        self._pulses = None

    def sight(self) -> Sight:
        """What was seen since the last call."""
        sight = Sight(self._pulses, self._looked_at_s, self._blind)
        self._pulses = None
        if sight.pulses is not None:
            self._blind = False
        return sight
