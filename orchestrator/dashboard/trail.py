"""Both streams of one job followed as one, through outages and other histories of the bus.

As `events/bus/follow.py` does for decisions: at each empty wait, and at a decision whose `after` is not the
last one known, it is looked whether this still is the same history; if not, all begins anew.
"""

from typing import NamedTuple

from relight.events.bus.follow import Away, Patient, Quiet
from relight.events.bus.job import JobBus
from relight.events.bus.journal import Journal
from relight.events.bus.streams import position
from relight.events.envelope import Entry
from relight.events.ids import BEGINNING, EntryId
from relight.orchestrator import chronicle


class Began(NamedTuple):
    """The newest entries as they stand; what was followed before is void."""

    birth: str
    """Of the state, empty where there is none."""
    entries: list[Entry]


class Came(NamedTuple):
    """The next entries, in the order of the bus."""

    entries: list[Entry]
    missed: bool
    """Whether some before them were trimmed unread."""


class Back(NamedTuple):
    """The bus serves again, and has the same history."""


Event = Began | Came | Away | Back | Quiet


class Trail(Patient[Began | Came | Back]):
    """A cursor in both streams."""

    def __init__(self, job: JobBus, *, count: int) -> None:
        super().__init__()
        self._job = job
        self._count = count
        self._journal = Journal(job, reader=job.bus.readers)
        self._history: tuple[str, str] | None = None
        """Birth and stamp; none before the first reading."""
        self._decision: EntryId | None = None
        """The last one that was read; none where none was."""

    async def _next(self) -> Began | Came | Back | Quiet:
        if self._history is None:
            return await self._begin()
        if self._away is not None:
            again = await self._is_another()
            self._away = None
            return await self._begin() if again else Back()
        batch = await self._journal.next()
        missed = self._read(batch)
        if (missed or not batch) and await self._is_another():
            return await self._begin()
        return Came(batch, missed) if batch else Quiet()

    async def _begin(self) -> Began:
        self._history = None
        history = await self._present()
        self._journal.restart()
        entries = await self._journal.tail(count=self._count)
        self._decision = None
        self._read(entries)
        self._history, self._away = history, None
        return Began(history[0], entries)

    def _read(self, entries: list[Entry]) -> bool:
        """Take note of the decisions among `entries`; whether one is missing before any of them."""
        missed = False
        for entry in entries:
            if chronicle.from_decisions(entry):
                missed |= self._decision is not None and entry.after != self._decision
                self._decision = entry.entry_id
        return missed

    async def _present(self) -> tuple[str, str]:
        birth, _ = await self._job.end()
        return birth or "", await self._job.bus.stamp()

    async def _is_another(self) -> bool:
        """Whether the bus has another history than the one that is followed."""
        assert self._history is not None
        birth, end = await self._job.end()
        if end < position(self._decision or BEGINNING):
            return True
        present = birth or "", await self._job.bus.stamp()
        if not self._history[0] and present[1] == self._history[1]:
            self._history = present  # the first commit gave the state its birth
        return present != self._history
