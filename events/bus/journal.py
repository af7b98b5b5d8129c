"""Both streams of a job as one, in the order of the bus.

Facts and decisions get their ids from one server's clock, so their ids order them. One XREAD sees both
streams at one moment; a stream that it could not read to its end holds the other one back.
"""

from relight.events.bus import streams
from relight.events.bus.errors import translated
from relight.events.bus.job import JobBus
from relight.events.envelope import Entry
from relight.events.ids import BEGINNING, EntryId

BATCH = 512
"""Entries of each stream in one reading."""


def position(entry_id: EntryId) -> tuple[int, int]:
    """What orders entry ids; raises ValueError for what is none."""
    milliseconds, _, serial = entry_id.partition("-")
    return int(milliseconds), int(serial)


def merged(facts: list[Entry], decisions: list[Entry]) -> list[Entry]:
    """Entries of both streams in the order of the bus; a fact stands before a decision of the same id."""
    return sorted([*facts, *decisions], key=lambda entry: position(entry.entry_id))


class Journal:
    """A cursor in both streams of one job. `next()` is safe to cancel; after an error it goes on."""

    def __init__(self, job: JobBus, *, after: EntryId = BEGINNING) -> None:
        self._job = job
        self._reader = job.bus.reader()
        self._after = {job.keys.facts: after, job.keys.decisions: after}

    async def tail(self, *, count: int) -> list[Entry]:
        """The newest `count` entries; `next()` goes on behind them. Raises BusUnavailable."""
        batch: list[list[Entry]] = []
        for stream in self._after:
            entries = await self._job.tail(stream, count=count)
            if entries:
                self._after[stream] = entries[-1].entry_id
            batch.append(entries)
        return merged(*batch)[-count:]

    async def next(self) -> list[Entry]:
        """What came, in order; empty after one BLOCK without any. Raises BusUnavailable."""
        with translated(self._job.bus.url):
            read = await streams.read_several(
                self._reader, self._after, block_ms=streams.BLOCK_MS, count=BATCH
            )
        full = [entries[-1].entry_id for entries in read.values() if len(entries) == BATCH]
        until = min(map(position, full), default=None)
        batch: list[list[Entry]] = [[], []]
        for place, stream in enumerate(self._after):
            due = [e for e in read.get(stream, []) if until is None or position(e.entry_id) <= until]
            if due:
                self._after[stream] = due[-1].entry_id
            batch[place] = due
        return merged(*batch)

    def restart(self) -> None:
        """Begin again with the first entry: the server is another one or was emptied."""
        self._after = dict.fromkeys(self._after, BEGINNING)
