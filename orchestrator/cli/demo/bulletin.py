"""Everything that comes on a job's bus, as it comes, and waiting for something to come. Reads only."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from relight.events import codec
from relight.events.bus.follow import RETRY_S
from relight.events.bus.job import JobBus
from relight.events.bus.journal import Journal
from relight.events.decisions import Decision
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.facts import Fact
from relight.events.ids import BEGINNING, EntryId
from relight.orchestrator.cli.demo.errors import DemoFailed

M = TypeVar("M", bound=Fact | Decision)


class Bulletin:
    """The job's entries so far. `run` reads on for ever; `until` waits for a message."""

    def __init__(self, job: JobBus, *, show: Callable[[Entry, Fact | Decision], None]) -> None:
        self._job = job
        self._show = show
        self._told: list[tuple[Entry, Fact | Decision]] = []
        self._news = anyio.Event()
        self.facts = BEGINNING
        """The newest fact so far."""
        self.decisions = BEGINNING
        """The newest decision so far."""

    async def run(self) -> None:
        journal = Journal(self._job)
        while True:
            try:
                batch = await journal.next()
            except BusUnavailable:
                await anyio.sleep(RETRY_S[-1])
                continue
            for entry in batch:
                self._take(entry)
            if batch:
                self._news.set()
                self._news = anyio.Event()

    def _take(self, entry: Entry) -> None:
        if entry.after is None:
            self.facts = entry.entry_id
        else:
            self.decisions = entry.entry_id
        try:
            message = codec.decode_fact(entry) if codec.is_fact(entry) else codec.decode_decision(entry)
        except Undecodable:
            return  # the audit reads the streams again, whole
        self._told.append((entry, message))
        self._show(entry, message)

    def all(self, kind: type[M] | tuple[type[M], ...]) -> list[tuple[Entry, M]]:
        """Every message of one type, or of several, so far."""
        return [(entry, message) for entry, message in self._told if isinstance(message, kind)]

    async def until(
        self,
        kind: type[M] | tuple[type[M], ...],
        right: Callable[[Entry, M], bool],
        *,
        within_s: float,
        what: str,
    ) -> tuple[Entry, M]:
        """The first right message of these types, past or to come; raises DemoFailed that names `what`."""
        with anyio.move_on_after(within_s):
            while True:
                news = self._news
                for entry, message in self.all(kind):
                    if right(entry, message):
                        return entry, message
                await news.wait()
        raise DemoFailed(f"{what} did not come within {within_s:g} s")


async def whole(job: JobBus) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Both streams from their beginning, read afresh: facts, then decisions. Raises BusUnavailable."""
    return await _all(job.read_facts), await _all(job.read_decisions)


async def _all(read: Callable[[EntryId], Awaitable[list[Entry]]]) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    while batch := await read(entries[-1].entry_id if entries else BEGINNING):
        entries += batch
    return tuple(entries)
