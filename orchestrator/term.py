"""One term: the time in which this process alone decides for one job.

Facts are read after the committed cursor; what a batch of them or a deadline leads to is committed in one
step, or the term is over. Nothing is done besides reading and committing, so a term can end anywhere.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from typing import NoReturn

import anyio
import msgspec

from relight.events import codec
from relight.events.bus.follow import RETRY_S
from relight.events.bus.job import Commit, JobBus, Lease, Reader
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, LostLease, Undecodable
from relight.events.facts import AnyFact, NodeSilent, NodeUp, TrainerSilent
from relight.events.ids import EntryId, Source, agent_source, trainer_source
from relight.events.schema import Meta, Snapshot
from relight.events.version import BASE
from relight.orchestrator.core.job import Job, Step
from relight.orchestrator.core.step import committed, step, take_over, tick
from relight.orchestrator.core.timers import next_wake
from relight.orchestrator.settings import Settings
from relight.orchestrator.silence import Silence

log = logging.getLogger("relight.orchestrator")

LEASE_MARGIN_S = 0.3
"""A holder stops this long before its lease ends: longer than a commit takes."""

LOOK_S = 1.0
"""How often pulses and the server's identity are looked at."""

TRIM_S = 10.0
"""How often the streams are trimmed: what 10 s can add is small against what is kept."""

STALL_S = 3.0
"""A longer pause between two looks was a stall of our own: everybody gets a fresh grace period."""


class HigherEpochSeen(LostLease):
    """An agent obeyed a higher epoch than ours: the bus lost it. The next term begins above it."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"an agent has obeyed epoch {epoch}")
        self.epoch = epoch


class Term:
    """The loop of one job under one lease. `run` ends only by LostLease (or cancellation)."""

    def __init__(
        self, bus: JobBus, lease: Lease, settings: Settings, *, reader: Reader, taken_at_s: float
    ) -> None:
        self._bus = bus
        self._lease = lease
        self._settings = settings
        self._source = Source(f"orchestrator/{lease.holder}")
        self._reader = reader
        self._silence = Silence()
        self._held_until_s = taken_at_s + settings.lease_s - LEASE_MARGIN_S
        self._looked_at_s = 0.0
        self._ticked = 0
        self._stamp = "none"
        self._number = 0
        self._cursor = EntryId("0-0")
        self._written = Snapshot()

    async def run(self) -> NoReturn:
        await self._bus.bus.tell_time()
        await self._bus.bus.enrol(self._bus.name)
        self._stamp = await self._bus.bus.stamp()
        job = await self._begin(await self._bus.snapshot())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hold)
            while True:
                job = await self._turn(job)
        raise AssertionError("unreachable")

    async def _begin(self, found: Snapshot) -> Job:
        """The job as it stands on the bus, taken over: everybody is asked what is true."""
        self._number, self._cursor, self._written = found.commit, found.cursor, found
        meta = found.meta or Meta(birth=uuid.uuid4().hex, version=BASE, bus=self._stamp)
        meta = msgspec.structs.replace(meta, settings=msgspec.to_builtins(self._settings))
        job = Job(self._lease.epoch, self._settings, meta, found.engines)
        first = take_over(job, now=self._now(), bus=self._stamp)
        await self._commit(first, self._cursor)
        log.info("term began job=%s epoch=%d commit=%d", self._bus.name, self._lease.epoch, self._number)
        return first.job

    async def _turn(self, job: Job) -> Job:
        """Wait for facts or a deadline; commit what follows."""
        entries = await self._read(job)
        decided = Step(job, ())
        for entry in entries:
            decided = await self._take(decided, entry)
        for silence in await self._silences(decided.job):
            decided = _join(decided, step(decided.job, silence, now=self._now()))
        due, now = next_wake(decided.job, ticked=self._ticked), self._now()
        if due is not None and due <= now:
            decided = _join(decided, tick(decided.job, now=now))
            self._ticked = now
        if entries or decided.decisions or decided.job != job:
            await self._commit(decided, entries[-1].entry_id if entries else self._cursor)
        after = committed(decided.job, now=self._now())
        if after.decisions:
            await self._commit(after, self._cursor)
        return after.job

    async def _read(self, job: Job) -> list[Entry]:
        due = next_wake(job, ticked=self._ticked)
        wait_ms = 1000 if due is None else due - self._now()
        try:
            if wait_ms <= 0:
                return await self._bus.read_facts(self._cursor)
            return await self._bus.read_facts(self._cursor, reader=self._reader, block_ms=wait_ms)
        except BusUnavailable as error:
            log.warning("facts cannot be read job=%s error=%s", self._bus.name, error)
            await anyio.sleep(RETRY_S[1])
            return []

    async def _take(self, decided: Step, entry: Entry) -> Step:
        """One entry's step; what cannot be decoded is parked and counted."""
        try:
            fact = codec.decode_fact(entry)
        except Undecodable as error:
            log.warning("entry parked job=%s entry=%s reason=%s", self._bus.name, entry.entry_id, error)
            await self._bus.park(entry, str(error))
            return decided
        if isinstance(fact, NodeUp) and fact.max_epoch > self._lease.epoch:
            raise HigherEpochSeen(fact.max_epoch)
        return _join(decided, step(decided.job, fact, now=self._now(), cause=entry.entry_id))

    async def _silences(self, job: Job) -> Sequence[AnyFact]:
        """Whose pulse has stood still for too long, looked at once a second."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s < LOOK_S:
            return ()
        nodes = {agent_source(node): node for node, record in job.meta.nodes.items() if not record.silent}
        trainer = trainer_source(job.meta.run)
        watched = job.meta.run > 0 and not job.meta.finished and not job.meta.trainer_silent
        expected = [*nodes, *([trainer] if watched else [])]
        try:
            pulses = await self._bus.pulses()
        except BusUnavailable:
            self._silence = Silence()
            return ()
        if now_s - self._looked_at_s > STALL_S:
            self._silence = Silence()
        self._looked_at_s = now_s
        self._silence.look(pulses, expected, now_s=now_s)
        silent: list[AnyFact] = []
        for source, node in nodes.items():
            still_s = self._silence.silent_s(source, now_s=now_s)
            if still_s > self._settings.node_silence_s:
                silent.append(NodeSilent(node=node, since=self._now() - int(still_s * 1000)))
        still_s = self._silence.silent_s(trainer, now_s=now_s)
        if watched and still_s > self._settings.trainer_silence_s:
            silent.append(TrainerSilent(run=job.meta.run, since=self._now() - int(still_s * 1000)))
        return silent

    # --- the lease and the commit ------------------------------------------------------------------

    async def _hold(self) -> NoReturn:
        """Renew the lease; end the term before it expires, or when the server is another one."""
        ttl_ms = int(self._settings.lease_s * 1000)
        trimmed_at_s = time.monotonic()
        while True:
            await anyio.sleep(self._settings.lease_s / 3.0)
            asked_at_s = time.monotonic()
            try:
                if not await self._bus.renew_lease(self._lease, ttl_ms=ttl_ms):
                    raise LostLease(f"job {self._bus.name}: the lease of epoch {self._lease.epoch} is gone")
                self._held_until_s = asked_at_s + self._settings.lease_s - LEASE_MARGIN_S
                await self._bus.bus.tell_time()
                if await self._bus.bus.stamp() != self._stamp:
                    raise LostLease(f"job {self._bus.name}: the bus is another server than before")
                if asked_at_s - trimmed_at_s > TRIM_S:
                    await self._bus.trim(self._lease, keep=self._settings.keep_entries)
                    trimmed_at_s = asked_at_s
            except BusUnavailable:
                self._check_lease()

    def _check_lease(self) -> None:
        if time.monotonic() >= self._held_until_s:
            raise LostLease(
                f"job {self._bus.name}: the lease of epoch {self._lease.epoch} could not be renewed"
            )

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
        commit = Commit(number=self._number + 1, cursor=cursor, state=changed, decisions=decided.decisions)
        tries = 0
        while True:
            self._check_lease()
            try:
                await self._bus.commit(commit, lease=self._lease, source=self._source)
                break
            except BusUnavailable as error:
                log.warning("commit waits job=%s error=%s", self._bus.name, error)
                await anyio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                tries += 1
        self._number, self._cursor = commit.number, cursor
        self._written = Snapshot(meta=job.meta, engines=dict(job.engines))
        for decision in decided.decisions:
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
