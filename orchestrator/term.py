"""One term: the time in which this process alone decides for one job.

Facts are read after the committed cursor; what a batch of them or a deadline leads to is committed in one
step, or the term is over. Nothing is done besides reading and committing, so a term can end anywhere. What
all jobs need each second (the lease, pulses, bus time) is not asked for here but once for the process.
"""

import logging
import random
import uuid
from collections.abc import Collection, Sequence
from typing import NoReturn

import anyio

from relight.events import codec
from relight.events.bus.follow import RETRY_S
from relight.events.bus.job import Commit, JobBus, Reader
from relight.events.bus.streams import BLOCK_MS
from relight.events.decisions import Decision
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, LostLease, RelightError, Undecodable
from relight.events.facts import AnyFact, Fact, NodeUp
from relight.events.ids import EntryId, Source
from relight.events.schema import Meta, Snapshot
from relight.events.version import BASE
from relight.orchestrator.core.job import Job, Step, Work
from relight.orchestrator.core.step import committed, step, take_over, tick
from relight.orchestrator.core.timers import next_wake
from relight.orchestrator.fairness import Lanes, Slice
from relight.orchestrator.silence import Silence
from relight.orchestrator.tenure import Committed, Tenure

log = logging.getLogger("relight.orchestrator")

BATCH = 4
"""Entries of one turn: reading and committing them holds others up for half a millisecond each. What a turn
costs besides is small against the steps of so many."""


CAREFUL = 4 * BATCH
"""Entries that a term after a failed one takes one by one: more than the batch that it failed on."""

EPOCHS_END = 2**53
"""Beyond it the server's scripts cannot count; a report of such an epoch is no report."""


class HigherEpochSeen(LostLease):
    """An agent obeyed a higher epoch than ours: the bus lost it. The next term begins above it."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"an agent has obeyed epoch {epoch}")
        self.epoch = epoch


class Indigestible(Exception):
    """An entry's step or its commit failed: a bug, told by the error that this one is raised from."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(f"entry {entry.entry_id}, {entry.type} from {entry.source!r}, cannot be digested")
        self.entry_id = entry.entry_id


class Term:
    """The loop of one job under one lease. `run` ends only by an error or cancellation.

    `passed_over`: entries that earlier terms failed on again and again; they are parked, with an Alarm.
    `one_by_one`: so many entries are taken singly, so that one that fails is known.
    """

    def __init__(
        self,
        bus: JobBus,
        tenure: Tenure,
        *,
        lanes: Lanes,
        passed_over: Collection[EntryId] = (),
        one_by_one: int = 0,
    ) -> None:
        self._bus = bus
        self._tenure = tenure
        self._lanes = lanes
        self._passed_over = passed_over
        self._one_by_one = one_by_one
        self._source = Source(f"orchestrator/{tenure.lease.holder}")
        self._silence = Silence()
        self._caught_up = False
        self._ticked = 0
        self._due: int | None = None
        """When time alone may have an effect next; what a turn adds to it is seen after its commit."""
        self._number = 0
        self._cursor = EntryId("0-0")
        self._written = Snapshot()

    async def run(self) -> NoReturn:
        async with self._lanes.beginning:
            async with self._lanes.commands:
                found = await self._bus.snapshot()
            job = await self._begin(found)
        reader = self._bus.bus.readers
        async with self._lanes.connecting:
            entries = await self._bus.read_facts(self._cursor, reader=reader, count=self._count)
        while True:
            job = await self._guarded_turn(job, entries)
            entries = await self._read(reader)
        raise AssertionError("unreachable")

    async def _begin(self, found: Snapshot) -> Job:
        """The job as it stands on the bus, taken over: everybody is asked what is true."""
        self._number, self._cursor, self._written = found.commit, found.cursor, found
        self._tenure.begins(Committed(self._number, self._cursor))
        epoch, stamp = self._tenure.lease.epoch, self._tenure.stamp
        meta = found.meta or Meta(birth=uuid.uuid4().hex, version=BASE, bus=stamp)
        job = Job(epoch, self._tenure.settings, meta, found.engines)
        first = take_over(job, now=self._now(), bus=stamp)
        await self._commit(first, self._cursor)
        self._due = next_wake(first.job, ticked=self._ticked)
        log.info("term began job=%s epoch=%d commit=%d", self._bus.name, epoch, self._number)
        return first.job

    @property
    def _count(self) -> int:
        return 1 if self._one_by_one else BATCH

    async def _guarded_turn(self, job: Job, entries: Sequence[Entry]) -> Job:
        try:
            return await self._turn(job, entries)
        except RelightError:
            raise
        except Exception as error:
            if len(entries) == 1:
                raise Indigestible(entries[0]) from error
            raise

    async def _turn(self, job: Job, entries: Sequence[Entry]) -> Job:
        """Commit what follows from `entries`, from silence and from the passing of time."""
        decided = await self._digested(job, entries)
        self._caught_up = len(entries) < self._count
        self._one_by_one = max(0, self._one_by_one - len(entries))
        for silence in self._silences(decided.job):
            decided = _join(decided, step(decided.job, silence, now=self._now()))
        now = self._now()
        if self._due is not None and self._due <= now:
            decided = _join(decided, tick(decided.job, now=now))
            self._ticked = now
        if entries or decided.decisions or decided.job != job:
            await self._commit(decided, entries[-1].entry_id if entries else self._cursor)
        after = committed(decided.job, now=self._now())
        if after.decisions:
            await self._commit(after, self._cursor)
        self._due = next_wake(after.job, ticked=self._ticked)
        return after.job

    async def _read(self, reader: Reader) -> list[Entry]:
        wait_ms = random.randint(BLOCK_MS * 8 // 10, BLOCK_MS)  # noqa: S311 -- or all jobs look up at once
        if self._due is not None:
            wait_ms = min(wait_ms, self._due - self._now())
        block_ms = wait_ms if wait_ms > 0 else None
        try:
            return await self._bus.read_facts(
                self._cursor, reader=reader, block_ms=block_ms, count=self._count
            )
        except BusUnavailable:  # the bus tells once what is wrong with it
            self._tenure.saw_nothing()
            await anyio.sleep(RETRY_S[1])
            return []

    async def _digested(self, job: Job, entries: Sequence[Entry]) -> Step:
        decisions: list[Decision | Fact] = []
        turn = Slice()
        for at, entry in enumerate(entries):
            if at:
                await turn.shared()
            decided = await self._taken(job, entry)
            job = decided.job
            decisions += decided.decisions
        return Step(job, tuple(decisions))

    async def _taken(self, job: Job, entry: Entry) -> Step:
        """One entry's step; what cannot be decoded is parked and counted."""
        if entry.entry_id in self._passed_over:
            return await self._pass_over(job, entry)
        try:
            fact = codec.decode_fact(entry)
            if isinstance(fact, NodeUp) and fact.max_epoch >= EPOCHS_END:
                raise Undecodable(
                    f"entry {entry.entry_id}: {fact.max_epoch} is no epoch that was ever issued"
                )
        except Undecodable as error:
            log.warning("entry parked job=%s entry=%s reason=%s", self._bus.name, entry.entry_id, error)
            await self._park(entry, str(error))
            return Step(job, ())
        if isinstance(fact, NodeUp) and fact.max_epoch > self._tenure.lease.epoch:
            raise HigherEpochSeen(fact.max_epoch)
        return step(job, fact, now=self._now(), cause=entry.entry_id)

    async def _pass_over(self, job: Job, entry: Entry) -> Step:
        """Go on without an entry that terms fail on: the reports that a new term asks for tell what is true,
        and a job that stands still for ever recovers nobody."""
        reason = f"term after term failed on {entry.type} from {entry.source!r}"
        log.error("entry parked job=%s entry=%s reason=%s", self._bus.name, entry.entry_id, reason)
        await self._park(entry, reason)
        work = Work(job, now=self._now(), cause=entry.entry_id)
        work.alarm(
            "poison", f"entry {entry.entry_id} is parked: {reason}", reason="the job goes on without it"
        )
        return work.done()

    async def _park(self, entry: Entry, reason: str) -> None:
        """Keep it for people. The job goes on where that is refused: the log has said it."""
        try:
            async with self._lanes.commands:
                await self._bus.park(entry, reason)
        except BusUnavailable as error:
            log.warning("entry not parked job=%s entry=%s error=%s", self._bus.name, entry.entry_id, error)

    def _silences(self, job: Job) -> list[AnyFact]:
        """Who has been silent for too long. Nobody is judged before everything that was said is read."""
        if not self._caught_up:
            return []
        sight = self._tenure.sight()
        if sight.blind:
            self._silence.forgive()
        if sight.pulses is None:
            return []
        return self._silence.judge(job, sight.pulses, now_s=sight.at_s, now=self._now())

    async def _commit(self, decided: Step, cursor: EntryId) -> None:
        """Commit, saying it again after a lost reply, for as long as the lease lasts."""
        job, written = decided.job, self._written
        changed = dict(
            codec.encode_engine(name, engine)
            for name, engine in job.engines.items()
            if written.engines.get(name) is not engine
        )
        if job.meta is not written.meta:
            changed.update([codec.encode_meta(job.meta)])
        commit = Commit(
            number=self._number + 1,
            cursor=cursor,
            state=changed,
            dropped=[codec.engine_field(name) for name in written.engines.keys() - job.engines.keys()],
            decisions=decided.decisions,
        )
        tries = 0
        while True:
            self._tenure.check()
            try:
                async with self._lanes.commands:
                    await self._bus.commit(commit, lease=self._tenure.lease, source=self._source)
                break
            except BusUnavailable:
                self._tenure.saw_nothing()
                await anyio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                tries += 1
        self._number, self._cursor = commit.number, cursor
        self._tenure.advanced(Committed(commit.number, cursor))
        self._written = Snapshot(meta=job.meta, engines=dict(job.engines))
        self._tenure.stands = job
        turn = Slice()
        for decision in decided.decisions:
            await turn.shared()
            log.info("decided job=%s %s", self._bus.name, _line(decision))

    def _now(self) -> int:
        return self._bus.bus.clock.now_ms()


def _join(before: Step, after: Step) -> Step:
    return Step(after.job, (*before.decisions, *after.decisions))


def _line(decision: object) -> str:
    """A decision in a few words, for the log."""
    name = getattr(decision, "engine", None)
    subject = f" {name}.{getattr(decision, 'incarnation', '')}" if name else ""
    return f"type={type(decision).__name__}{subject} reason={getattr(decision, 'reason', '')!r}"
