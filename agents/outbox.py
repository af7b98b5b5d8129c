"""Facts on their way to the bus: numbered, kept until they are in the stream, appended in order.

An agent's outbox lies on disk and is fsynced, so that a death it saw outlives it; a trainer's lies in
memory, since its facts die with its run. Both are bounded: a full one is replaced by one fact that says
how things stand now.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import anyio

from relight.events import codec
from relight.events.bus.follow import RETRY_S
from relight.events.bus.job import JobBus, Numbered
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable
from relight.events.facts import Fact
from relight.events.ids import BootId, EntryId, Source

CAPACITY = 10_000
"""Unsent facts an outbox holds: days of a node's ordinary life, a few MB."""


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


def _now_ms() -> int:
    return int(time.time() * 1000)


class MemoryOutbox:
    """An outbox that ends with its process."""

    def __init__(self, *, collapse: Callable[[], Fact] | None = None, capacity: int = CAPACITY) -> None:
        self._facts: list[Numbered] = []
        self._seq = 0
        self._collapse = collapse
        self._capacity = capacity

    def put(self, fact: Fact) -> None:
        if self._collapse is not None and len(self._facts) >= self._capacity:
            self._facts.clear()
            fact = self._collapse()
        self._seq += 1
        self._facts.append(Numbered(self._seq, fact, _now_ms()))

    def waiting(self, limit: int) -> Sequence[Numbered]:
        return self._facts[:limit]

    def sent(self, seq: int) -> None:
        self._facts = [numbered for numbered in self._facts if numbered.seq > seq]


class FileOutbox:
    """An outbox in a directory: a log of numbered facts, and the last number that was sent.

    Each `put` is one fsynced line. A torn last line is a fact whose `put` never returned: it is dropped.
    """

    def __init__(
        self, directory: Path, *, collapse: Callable[[], Fact], source: Source, capacity: int = CAPACITY
    ) -> None:
        self._path = directory / "outbox.jsonl"
        self._collapse = collapse
        self._source = source
        self._capacity = capacity
        self._facts: list[Numbered] = []
        self._seq = 0
        self._load()
        self._file = self._path.open("ab", buffering=0)

    def _load(self) -> None:
        if not self._path.exists():
            return
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            seq, _, body = line.partition(b" ")
            self._seq = max(self._seq, int(seq))
            if body:
                fields = codec.from_json(body, dict[str, str])
                entry: Entry = codec.entry(EntryId(f"0-{self._seq}"), fields)
                self._facts.append(Numbered(self._seq, codec.decode_fact(entry), entry.time))
            else:
                self._facts = [numbered for numbered in self._facts if numbered.seq > int(seq)]
        self._rewrite()

    def put(self, fact: Fact) -> None:
        if len(self._facts) >= self._capacity:
            self._facts.clear()
            fact = self._collapse()
        self._seq += 1
        numbered = Numbered(self._seq, fact, _now_ms())
        self._facts.append(numbered)
        self._write(self._line(numbered))
        os.fsync(self._file.fileno())

    def waiting(self, limit: int) -> Sequence[Numbered]:
        return self._facts[:limit]

    def sent(self, seq: int) -> None:
        """Not fsynced: a number that is sent again changes nothing."""
        self._facts = [numbered for numbered in self._facts if numbered.seq > seq]
        if self._facts or self._path.stat().st_size < 1_000_000:
            self._write(f"{seq} \n".encode())
            return
        self._file.close()
        self._rewrite()
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        if self._file.write(line) != len(line):
            raise OSError(f"{self._path}: short write, the disk may be full")

    def _line(self, numbered: Numbered) -> bytes:
        fields = codec.encode(numbered.fact, source=self._source, time_ms=numbered.time_ms)
        return f"{numbered.seq} {codec.to_json(fields)}\n".encode()

    def _rewrite(self) -> None:
        """The log with nothing in it but what is unsent and the last number, put in place atomically."""
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            unsent = self._facts[0].seq if self._facts else self._seq + 1
            file.write(f"{unsent - 1} \n".encode())
            file.writelines(self._line(numbered) for numbered in self._facts)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


class Publisher:
    """Takes facts from anywhere in the event loop and appends them, however long the bus is away."""

    def __init__(self, job: JobBus, outbox: Outbox, *, source: Source, boot: BootId) -> None:
        self._job = job
        self._outbox = outbox
        self._source = source
        self._boot = boot
        self._wake = anyio.Event()
        self._idle = anyio.Event()
        self._installed = False

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
        await self._job.append([], source=self._source, boot=self._boot, install=True)
        self._installed = True

    async def run(self, *, install: bool) -> None:
        """Append what waits, for ever. Raises Fenced where another life of the source has spoken."""
        tries = 0
        while True:
            try:
                if install and not self._installed:
                    await self.install()
                while batch := self._outbox.waiting(100):
                    await self._job.append(batch, source=self._source, boot=self._boot)
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
