"""Facts on their way to the bus: numbered, kept until they are in the stream, appended in order.

An agent's outbox lies on disk and is fsynced, so that a death it saw outlives it; a trainer's lies in
memory, since its facts die with its run. Both are bounded: a full one is replaced by one fact that says
how things stand now.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import anyio

from relight.events import codec
from relight.events.bus.follow import RETRY_S
from relight.events.bus.job import JobBus, Numbered
from relight.events.errors import BusUnavailable, Fenced, Undecodable, UsageError
from relight.events.facts import Fact
from relight.events.ids import BootId, EntryId, Source

log = logging.getLogger(__name__)

CAPACITY = 10_000
"""Unsent facts an outbox holds: days of a node's ordinary life, a few MB."""

COMPACT_BYTES = 1_000_000
"""A log larger than this is written anew as soon as nothing waits."""


class Outbox(Protocol):
    """Where unsent facts wait. Numbers only grow, also across lives of the process."""

    def put(self, fact: Fact) -> None:
        """Keep `fact` under the next number. It is kept once this returns."""
        ...

    def waiting(self, limit: int) -> Sequence[Numbered]:
        """The oldest unsent facts."""
        ...

    def sent(self, seq: int) -> None:
        """Everything up to `seq` is in the stream."""
        ...

    def lift(self, seq: int) -> None:
        """The bus has taken numbers up to `seq`. Where that is more than were ever given here, the outbox was
        lost: what waits is numbered anew, above, or the bus would pass it over in silence.
        """
        ...


class MemoryOutbox:
    """An outbox that ends with its process."""

    def __init__(self, *, collapse: Callable[[], Fact] | None = None, capacity: int = CAPACITY) -> None:
        self._facts: list[Numbered] = []
        self._seq = 0
        self._collapse = collapse
        self._capacity = capacity

    def put(self, fact: Fact) -> None:
        if self._collapse is not None and len(self._facts) >= self._capacity:
            log.warning("the outbox is full: %d facts are replaced by how things stand", len(self._facts))
            self._facts.clear()
            fact = self._collapse()
        self._seq += 1
        self._facts.append(Numbered(self._seq, fact, int(time.time() * 1000)))

    def waiting(self, limit: int) -> Sequence[Numbered]:
        return self._facts[:limit]

    def sent(self, seq: int) -> None:
        self._facts = [numbered for numbered in self._facts if numbered.seq > seq]

    def lift(self, seq: int) -> None:
        if seq <= self._seq:
            return
        log.warning("the bus has heard of numbers that are not known here: up to %d, not %d", seq, self._seq)
        self._facts = [each._replace(seq=seq + place) for place, each in enumerate(self._facts, start=1)]
        self._seq = seq + len(self._facts)


class FileOutbox(MemoryOutbox):
    """An outbox in a directory: a log of numbered facts, and the last number that was sent.

    Each `put` is one fsynced line. A torn last line is a fact whose `put` never returned: it is dropped. So
    is a line that cannot be read, which the report of an agent's start makes good. While the disk takes
    nothing the facts wait in memory, and the log is written anew as soon as it does.
    """

    def __init__(
        self, directory: Path, *, collapse: Callable[[], Fact], source: Source, capacity: int = CAPACITY
    ) -> None:
        super().__init__(collapse=collapse, capacity=capacity)
        self._path = directory / "outbox.jsonl"
        self._source = source
        self._spoilt = False
        """Whether the log lacks a line, or ends in half of one."""
        try:
            if self._path.exists():
                for line in self._path.read_bytes().split(b"\n")[:-1]:
                    self._read(line)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"{self._path} cannot be used: {error}") from error
        self._rewrite()

    def _read(self, line: bytes) -> None:
        try:
            number, _, body = line.partition(b" ")
            seq = int(number)
            if not body:
                super().sent(seq)
            else:
                fields = codec.from_json(body, dict[str, str])
                entry = codec.entry(EntryId(f"0-{seq}"), fields)
                self._facts.append(Numbered(seq, codec.decode_fact(entry), entry.time))
        except (ValueError, Undecodable) as error:
            log.error("a line of %s cannot be read and is dropped: %s", self._path, error)
        else:
            self._seq = max(self._seq, seq)

    def put(self, fact: Fact) -> None:
        before = len(self._facts)
        super().put(fact)
        if self._spoilt or len(self._facts) <= before:  # the log still holds what was replaced
            self._rewrite()
        else:
            self._write(self._line(self._facts[-1]), lasting=True)

    def sent(self, seq: int) -> None:
        """Not fsynced: a number that is sent again changes nothing."""
        super().sent(seq)
        if self._spoilt or (not self._facts and self._size() >= COMPACT_BYTES):
            self._rewrite()
        else:
            self._write(f"{seq} \n".encode(), lasting=False)

    def lift(self, seq: int) -> None:
        before = self._seq
        super().lift(seq)
        if self._seq != before:
            self._rewrite()

    def close(self) -> None:
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _write(self, line: bytes, *, lasting: bool) -> None:
        try:
            if self._file.write(line) != len(line):
                raise OSError("short write, the disk may be full")
            if lasting:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._spoil(error)

    def _spoil(self, error: OSError) -> None:
        if not self._spoilt:
            log.error("%s cannot be written, facts wait in memory: %s", self._path, error)
        self._spoilt = True

    def _line(self, numbered: Numbered) -> bytes:
        fields = codec.encode(numbered.fact, source=self._source, time_ms=numbered.time_ms)
        return f"{numbered.seq} {codec.to_json(fields)}\n".encode()

    def _rewrite(self) -> None:
        """The log with nothing in it but what is unsent and the last number, put in place atomically."""
        fresh = self._path.with_suffix(".new")
        unsent = self._facts[0].seq if self._facts else self._seq + 1
        try:
            with fresh.open("wb") as file:
                file.write(f"{unsent - 1} \n".encode())
                file.writelines(self._line(numbered) for numbered in self._facts)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
            opened = self._path.open("ab", buffering=0)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            self._spoil(error)
            return
        self._file.close()
        self._file = opened
        if self._spoilt:
            log.info("%s is written again", self._path)
        self._spoilt = False


class Publisher:
    """Takes facts from anywhere in the event loop and appends them, however long the bus is away."""

    def __init__(self, job: JobBus, outbox: Outbox, *, source: Source, boot: BootId) -> None:
        self._job = job
        self._outbox = outbox
        self._source = source
        self._boot = boot
        self._wake = anyio.Event()
        self._idle = anyio.Event()
        self._installed_on: str | None = None
        """The stamp of the server on which this boot was made the source's own."""
        self._replaced: BootId | None = None
        """The boot that it took over from there."""

    def say(self, fact: Fact) -> None:
        """Publish `fact`: kept once this returns, in the stream as soon as the bus takes it."""
        self._outbox.put(fact)
        self._idle = anyio.Event()
        self._wake.set()

    async def flushed(self) -> None:
        """Return when nothing waits. The caller gives the deadline."""
        if self._outbox.waiting(1):
            await self._idle.wait()

    async def install(self) -> None:
        """Make this boot the source's own: once, at a start. Raises BusUnavailable."""
        stamp, before = await self._job.bus.stamp(), await self._job.seen(self._source)
        if before is not None and before.boot == self._boot:
            self._outbox.lift(before.seq)
        elif before is not None:
            self._replaced = before.boot
        await self._job.append([], source=self._source, boot=self._boot, install=True)
        self._installed_on = stamp

    async def run(self, *, install: bool) -> None:
        """Append what waits, for ever. Raises Fenced where another life of the source has spoken."""
        tries = 0
        while True:
            try:
                if install and self._installed_on is None:
                    await self.install()
                while batch := self._outbox.waiting(100):
                    await self._append(batch)
                    self._outbox.sent(batch[-1].seq)
                tries = 0
            except BusUnavailable:
                await anyio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                tries += 1
                continue
            if not self._outbox.waiting(1):
                self._idle.set()
                await self._wake.wait()
            self._wake = anyio.Event()

    async def _append(self, batch: Sequence[Numbered]) -> None:
        try:
            await self._job.append(batch, source=self._source, boot=self._boot)
        except Fenced:
            if not await self._was_rolled_back():
                raise
            log.info("the bus was rolled back behind this boot's start, which is told again")
            await self.install()
            await self._job.append(batch, source=self._source, boot=self._boot)

    async def _was_rolled_back(self) -> bool:
        """Whether another server knows no later boot than the one that this one took over from."""
        if self._replaced is None or self._installed_on in (None, "none", await self._job.bus.stamp()):
            return False
        seen = await self._job.seen(self._source)
        return seen is not None and seen.boot == self._replaced
