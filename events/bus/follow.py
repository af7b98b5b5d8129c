"""Following decisions: the state first, then the stream after its tail, for as long as the caller likes.

XREAD passes over trimmed entries without a word, and a deleted stream never wakes its readers. So an
entry whose `after` is not the last one known, and at each empty wait another birth, another server or a
state that ends before what was read, make the follower read the state again.
"""

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar

import anyio

from relight.events import codec
from relight.events.bus.clock import monotonic_ms
from relight.events.bus.job import JobBus
from relight.events.bus.streams import BLOCK_MS, position
from relight.events.decisions import AnyDecision
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.ids import BEGINNING
from relight.events.schema import Snapshot

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between tries while the bus is away; the last one repeats."""


class Synced(NamedTuple):
    """The state as it stands; what was followed before is void."""

    snapshot: Snapshot
    stamp: str
    """The server's own stamp; routes of a state with another one are void to a fresh reader."""
    why: str
    """`start`, `gap`, `reborn` (emptied, rolled back or another server) or `back` (the bus was away)."""


class Decided(NamedTuple):
    """The next decision, in order, none left out."""

    entry: Entry
    decision: AnyDecision


class Noted(NamedTuple):
    """An entry of `decisions` that is a fact (NodeSilent, TrainerSilent) or of no type known here."""

    entry: Entry


class Away(NamedTuple):
    """The bus cannot be reached or does not serve; told once, and again where the kind of trouble changes.
    `Synced` follows when it is back."""

    reason: str


class Quiet(NamedTuple):
    """Nothing came for one wait."""


Event = Synced | Decided | Noted | Away | Quiet


Met = TypeVar("Met")


class Patient(ABC, Generic[Met]):
    """A cursor that outlives outages. `next()` is safe to cancel and raises no error of the bus."""

    def __init__(self) -> None:
        self._tries = 0
        self._away: str | None = None
        """The kind of trouble that was told last, until `_next` has read again."""

    async def next(self) -> Met | Away | Quiet:
        """The next event; waits at most one BLOCK for it."""
        try:
            event = await self._next()
        except BusUnavailable as error:
            return await self._lost(error.kind, str(error))
        except Undecodable as error:  # a state that cannot be read serves nobody
            return await self._lost("undecodable", str(error))
        self._tries = 0
        return event

    async def _lost(self, kind: str, reason: str) -> Away | Quiet:
        if self._away != kind:
            self._away = kind
            return Away(reason)
        await anyio.sleep(RETRY_S[min(self._tries, len(RETRY_S) - 1)])
        self._tries += 1
        return Quiet()

    @abstractmethod
    async def _next(self) -> Met | Quiet: ...


class Follower(Patient[Synced | Decided | Noted]):
    """A cursor in one job's decisions."""

    def __init__(self, job: JobBus) -> None:
        super().__init__()
        self._job = job
        self._reader = job.bus.reader()
        self._known: Snapshot | None = None
        self._stamp = "none"
        self._last = BEGINNING
        self._ready: list[Entry] = []

    async def _next(self) -> Synced | Decided | Noted | Quiet:
        if self._known is None:
            return await self._synced("start")
        if self._away is not None:
            return await self._synced("back")
        if not self._ready:
            self._ready = await self._job.read_decisions(self._last, reader=self._reader, block_ms=BLOCK_MS)
        if not self._ready:
            return await self._synced("reborn") if await self._is_reborn() else Quiet()
        if self._known.birth is None:
            self._known = await self._job.snapshot()  # the first commit gave the state its birth
        entry = self._ready[0]
        if entry.after != self._last:
            return await self._synced("gap")
        del self._ready[0]
        self._last = entry.entry_id
        try:
            return Noted(entry) if codec.is_fact(entry) else Decided(entry, codec.decode_decision(entry))
        except Undecodable:
            return Noted(entry)

    async def _is_reborn(self) -> bool:
        """Whether what is followed is another state, or stands on another server or earlier than before."""
        birth, end = await self._job.end()
        if end < position(self._last):
            return True
        return self._differs(birth, await self._job.bus.stamp())

    def _differs(self, birth: str | None, stamp: str) -> bool:
        assert self._known is not None
        if self._known.birth is None:
            return birth is not None and self._last == BEGINNING
        return birth != self._known.birth or stamp != self._stamp

    async def _synced(self, why: str) -> Synced:
        await self._job.bus.tell_time()
        snapshot = await self._job.snapshot()
        stamp = await self._job.bus.stamp()  # behind it: a fail-over in between must show in the stamp
        if self._known is not None and self._differs(snapshot.birth, stamp):
            why = "reborn"
        self._known, self._stamp, self._last = snapshot, stamp, snapshot.tail
        self._ready = []
        self._away = None
        return Synced(snapshot, stamp, why)


async def reached(job: JobBus, *, within_s: float) -> Snapshot:
    """The state, waiting up to `within_s` for a bus that can serve; raises BusUnavailable after that."""
    deadline = monotonic_ms() + within_s * 1000.0
    while True:
        try:
            return await job.snapshot()
        except BusUnavailable:
            if monotonic_ms() >= deadline:
                raise
            await anyio.sleep(RETRY_S[1])
