"""All jobs of the bus as they stand, read for many at once: by whoever asks first, for all who ask soon.

A job's state is read again only where its commit has moved. Its ended recoveries and alarms are counted as
its decisions come, by the server: a stream is not sent here whole.
"""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import anyio

from relight.events.bus.client import Bus
from relight.events.bus.survey import Glance
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.ids import BEGINNING, EntryId, JobName
from relight.events.schema import Snapshot
from relight.orchestrator import annals
from relight.orchestrator.annals import Annals
from relight.orchestrator.looking import Unread, view
from relight.orchestrator.views import JobView

FRESH_S = 0.2
"""What was read this short a time ago is not read again."""


class _Known:
    """What was read of one job."""

    def __init__(self) -> None:
        self.read_at_s = float("-inf")
        self.glance: Glance | BusUnavailable | None = None
        self.state: Snapshot | Unread = Snapshot()
        self.state_at: tuple[int, int, EntryId] | None = None
        self.history: tuple[str, str | None] = "", None
        """The server's stamp and the state's birth."""
        self.annals = Annals()
        self.read_to = BEGINNING


class Standing(NamedTuple):
    """One job at one moment."""

    job: JobName
    view: JobView | Unread
    annals: Annals
    snapshot: Snapshot | None
    """None where it cannot be read."""


class Census:
    """Reads the bus. Every method raises BusUnavailable where the server cannot serve at all."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._survey = bus.survey()
        self._known: dict[JobName, _Known] = {}
        self._stamp = "none"
        self._alone = anyio.Lock()

    async def jobs(self) -> list[JobName]:
        """Every job that is enrolled. Those that are not any more are forgotten."""
        async with self._alone:
            found = await self._bus.jobs()
            for gone in self._known.keys() - set(found):
                del self._known[gone]
            return found

    async def has(self, job: JobName) -> bool:
        """Whether there is such a job."""
        if job in await self._bus.jobs():
            return True
        [standing] = await self.look([job])
        if standing.snapshot is None or standing.snapshot.meta is None:
            self._known.pop(job, None)
            return False
        return True

    async def look(self, jobs: Sequence[JobName]) -> list[Standing]:
        """How these jobs stand."""
        async with self._alone:
            now_s = time.monotonic()
            for job in jobs:
                self._known.setdefault(job, _Known())
            due = {job: self._known[job] for job in jobs if now_s - self._known[job].read_at_s > FRESH_S}
            if due:
                await self._bus.tell_time()
                self._stamp = await self._bus.stamp()
                await self._read(due)
            now_ms = self._bus.clock.now_ms()
            return [self._standing(job, now_ms) for job in jobs]

    def _standing(self, job: JobName, now_ms: int) -> Standing:
        known = self._known[job]
        assert known.glance is not None
        seen = view(job, known.glance, known.state, now_ms=now_ms, stamp=self._stamp)
        snapshot = known.state if isinstance(known.state, Snapshot) else None
        return Standing(job, seen, known.annals, snapshot)

    async def _read(self, due: dict[JobName, _Known]) -> None:
        for known, glance in zip(due.values(), await self._survey.glance(list(due)), strict=True):
            known.glance = glance
        moved = {job: known for job, known in due.items() if self._has_moved(known)}
        for known, state in zip(moved.values(), await self._survey.states(list(moved)), strict=True):
            self._learn(known, state)
        await self._read_annals(moved)
        now_s = time.monotonic()
        for known in due.values():
            known.read_at_s = now_s

    def _has_moved(self, known: _Known) -> bool:
        if not isinstance(known.glance, Glance) or not isinstance(known.state, Snapshot):
            return True
        at = known.glance.commit, known.glance.epoch, known.glance.tail
        return at != known.state_at or known.history[0] != self._stamp

    def _learn(self, known: _Known, state: Snapshot | BusUnavailable | Undecodable) -> None:
        known.state, known.state_at = state, None
        if not isinstance(state, Snapshot):
            return
        if known.history != (self._stamp, state.birth):
            known.history = self._stamp, state.birth
            known.annals.forget_shown()
            known.read_to = BEGINNING
        known.state_at = state.commit, state.epoch, state.tail

    async def _read_annals(self, moved: dict[JobName, _Known]) -> None:
        while moved:
            after = {job: known.read_to for job, known in moved.items()}
            found = await self._survey.decisions(after, types=annals.TYPES)
            for job, part in zip(after, found, strict=True):
                if isinstance(part, BusUnavailable):
                    del moved[job]
                    continue
                moved[job].annals.add(part.entries)
                moved[job].read_to = part.last
                if not part.more:
                    del moved[job]


def viewed(standings: Iterable[Standing]) -> Iterable[tuple[Standing, JobView]]:
    """Those that can be shown."""
    for standing in standings:
        if isinstance(standing.view, JobView):
            yield standing, standing.view
