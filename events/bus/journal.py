"""Both streams of a job as one, in the order of the bus.

Facts and decisions get their ids from one server's clock, so their ids order them. One XREAD sees both
streams at one moment; a stream that it could not read to its end holds the other one back, and itself
in its last millisecond.
"""

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from relight.events import codec
from relight.events.bus import streams
from relight.events.bus.job import JobBus, Reader
from relight.events.bus.streams import position
from relight.events.envelope import Entry
from relight.events.errors import Undecodable
from relight.events.ids import BEGINNING, EntryId

BATCH = 512
"""Entries of each stream in one reading."""


class _Ties(msgspec.Struct):
    answers: str | None = None
    sync: str | None = None


def merged(facts: Sequence[Entry], decisions: Sequence[Entry]) -> list[Entry]:
    """Entries of both streams in the order of the bus, each stream in its own order.

    Within one millisecond the streams' serials say nothing of each other; there a fact stands first
    unless it answers a decision that is yet to come, or belongs to the sync that one orders.
    """
    merged: list[Entry] = []
    left = deque(decisions)
    for fact in facts:
        while left and _comes_before(left, fact):
            merged.append(left.popleft())
        merged.append(fact)
    return [*merged, *left]


def _comes_before(decisions: Sequence[Entry], fact: Entry) -> bool:
    """Whether the first of `decisions` stands before `fact`."""
    first, when = position(decisions[0].entry_id)[0], position(fact.entry_id)[0]
    if first != when:
        return first < when
    ties = _ties(fact)
    same = takewhile(lambda decision: position(decision.entry_id)[0] == when, decisions)
    return any(
        (ties.answers is not None and decision.id == ties.answers)
        or (ties.sync is not None and decision.type == "SyncWeights" and _ties(decision).sync == ties.sync)
        for decision in same
    )


def _ties(entry: Entry) -> _Ties:
    try:
        return codec.from_json(entry.data, _Ties)
    except Undecodable:
        return _Ties()


class Journal:
    """A cursor in both streams of one job. `next()` is safe to cancel; after an error it goes on.

    `reader`: a client for blocked readers that others share; without it one of its own.
    """

    def __init__(self, job: JobBus, *, after: EntryId = BEGINNING, reader: Reader | None = None) -> None:
        self._job = job
        self._reader = reader or job.bus.reader()
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
        count = BATCH
        while True:
            with self._job.bus.asking(f"journal {self._job.name}", *self._after):
                read = await streams.read_several(
                    self._reader, self._after, block_ms=streams.BLOCK_MS, count=count
                )
            full = [entries[-1].entry_id for entries in read.values() if len(entries) == count]
            until = min((position(entry_id)[0] for entry_id in full), default=None)
            due = [
                [e for e in read.get(stream, ()) if until is None or position(e.entry_id)[0] < until]
                for stream in self._after
            ]
            if any(due) or until is None:
                break
            count *= 2  # more than one reading holds came within one millisecond
        for stream, entries in zip(self._after, due, strict=True):
            if entries:
                self._after[stream] = entries[-1].entry_id
        return merged(*due)

    def restart(self) -> None:
        """Begin again with the first entry: the server is another one or was emptied."""
        self._after = dict.fromkeys(self._after, BEGINNING)
