"""One job's part of the bus: append facts, commit decisions, read both, hold the lease.

Append is idempotent by (source, boot, number) and commit by (epoch, number), each in one Lua script: a
lost reply may be answered by saying the same thing again.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import redis.asyncio as redis

from relight.events import codec
from relight.events.bus import scripts, streams
from relight.events.decisions import Decision
from relight.events.envelope import Entry
from relight.events.errors import Fenced, LostLease, Undecodable
from relight.events.facts import Fact
from relight.events.ids import BEGINNING, BootId, EntryId, JobName, Source
from relight.events.keys import Keys
from relight.events.schema import Meta, Snapshot

if TYPE_CHECKING:
    from relight.events.bus.client import Bus


Reader = redis.Redis
"""A client of its own for one blocked reader."""


class Numbered(NamedTuple):
    """A fact with its sender's sequence number."""

    seq: int
    fact: Fact
    time_ms: int
    """The sender's wall clock at the time it happened, for people."""


class Seen(NamedTuple):
    """Under which boot a source speaks, and the last number that was appended."""

    boot: BootId
    seq: int


class Pulse(msgspec.Struct, frozen=True):
    """A source's sign of life: its boot and a number that advances each second."""

    boot: BootId
    seq: int


class Lease(NamedTuple):
    """The right to decide for a job under one epoch."""

    holder: str
    epoch: int

    @property
    def value(self) -> str:
        return f"{self.epoch}:{self.holder}"


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One atomic step: state fields, decisions and the cursor behind the facts that led to them."""

    number: int
    cursor: EntryId
    state: dict[str, str]
    dropped: Sequence[str] = ()
    """Fields of the state that are no more."""
    decisions: Sequence[Decision | Fact]


class JobBus:
    """What `Bus.job` gives out. Every method raises BusUnavailable where the server cannot serve."""

    def __init__(self, name: JobName, *, bus: "Bus", commands: "redis.Redis") -> None:
        self.name = name
        self.keys = Keys(name)
        self.bus = bus
        self._commands = commands
        self._append = commands.register_script(scripts.APPEND)
        self._commit = commands.register_script(scripts.COMMIT)
        self._take = commands.register_script(scripts.TAKE)
        self._renew = commands.register_script(scripts.RENEW)
        self._release = commands.register_script(scripts.RELEASE)
        self._trim = commands.register_script(scripts.TRIM)
        self._issue_run = commands.register_script(scripts.ISSUE_RUN)

    # --- facts -------------------------------------------------------------------------------------

    async def append(
        self, facts: Sequence[Numbered], *, source: Source, boot: BootId, install: bool = False
    ) -> int:
        """Append those that are new under `boot`, in order; how many were new.

        `install` makes `boot` the source's own (an agent's start). Raises Fenced where it is another.
        """
        args: list[str] = [source, boot, "1" if install else "0"]
        for numbered in facts:
            strings = _flat(codec.encode(numbered.fact, source=source, time_ms=numbered.time_ms))
            args += [str(numbered.seq), str(len(strings)), *strings]
        verdict, detail = await self._run(self._append, [self.keys.seen, self.keys.facts], args)
        if verdict == "FENCED":
            raise Fenced(f"{source} of job {self.name} now speaks as boot {detail}, not as {boot}")
        return int(detail)

    async def seen(self, source: Source) -> Seen | None:
        """What the bus knows of the source's facts; None where it has heard none, or forgot."""
        with self._asking("seen", self.keys.seen):
            text = await cast(Any, self._commands).hget(self.keys.seen, source)
        seq, _, boot = (text or "").partition(":")
        return Seen(BootId(boot), int(seq)) if seq.isdecimal() else None

    async def hint(self, fact: Fact, *, source: Source) -> EntryId:
        """Append a client's hint or an operator's wish: unnumbered, harmless when doubled."""
        fields = codec.encode(fact, source=source, time_ms=int(time.time() * 1000))
        with self._asking("hint", self.keys.facts):
            return EntryId(await cast(Any, self._commands).xadd(self.keys.facts, fields))

    async def read_facts(
        self,
        after: EntryId,
        *,
        reader: Reader | None = None,
        block_ms: int | None = None,
        count: int = 256,
    ) -> list[Entry]:
        return await self._read(self.keys.facts, after, reader, block_ms, count)

    async def park(self, entry: Entry, reason: str) -> None:
        """Keep an entry that could not be decoded, with the reason, bounded to about 1,000."""
        fields = {"entry": entry.entry_id, "type": entry.type, "source": entry.source, "data": entry.data}
        with self._asking("park", self.keys.parked):
            await cast(Any, self._commands).xadd(
                self.keys.parked, {**fields, "reason": reason}, maxlen=1000, approximate=True
            )

    async def parked(self) -> int:
        """How many entries are parked."""
        with self._asking("count parked", self.keys.parked):
            return int(await cast(Any, self._commands).xlen(self.keys.parked))

    # --- decisions ---------------------------------------------------------------------------------

    async def commit(self, commit: Commit, *, lease: Lease, source: Source) -> None:
        """All of it happens or none. Raises LostLease where another orchestrator has taken over."""
        state = [text for pair in commit.state.items() for text in pair]
        args = [lease.value, str(lease.epoch), str(commit.number - 1), str(commit.number), commit.cursor]
        args += [str(len(state)), *state, str(len(commit.dropped)), *commit.dropped]
        now = int(time.time() * 1000)
        for decision in commit.decisions:
            strings = _flat(codec.encode(decision, source=source, time_ms=now))
            args += [str(len(strings)), *strings]
        script_keys = [self.keys.lease, self.keys.state, self.keys.decisions]
        verdict, epoch, number, _ = await self._run(self._commit, script_keys, args)
        if verdict == "REFUSED" and (int(epoch), int(number)) != (lease.epoch, commit.number):
            raise LostLease(
                f"job {self.name}: commit {commit.number} of epoch {lease.epoch} was refused;"
                f" the state is at commit {number} of epoch {epoch}"
            )

    async def trim(self, lease: Lease, *, keep: int) -> int:
        """Drop the oldest entries of both streams but about `keep`, and no fact behind the committed cursor.

        How many are gone; -1 where the lease is no longer ours.
        """
        script_keys = [self.keys.lease, self.keys.state, self.keys.facts, self.keys.decisions]
        return int(await self._run(self._trim, script_keys, [lease.value, str(keep)]))

    async def read_decisions(
        self,
        after: EntryId,
        *,
        reader: Reader | None = None,
        block_ms: int | None = None,
        count: int = 256,
    ) -> list[Entry]:
        return await self._read(self.keys.decisions, after, reader, block_ms, count)

    async def snapshot(self) -> Snapshot:
        """The committed state, in one reading; raises Undecodable where it is not ours."""
        with self._asking("read", self.keys.state):
            fields = await cast(Any, self._commands).hgetall(self.keys.state)
        return codec.decode_state(fields)

    async def birth(self) -> str | None:
        """The state's birth as it stands now; None where there is no state; raises Undecodable."""
        return (await self.end())[0]

    async def end(self) -> tuple[str | None, tuple[int, int]]:
        """The state's birth (None where there is no state) and the position of the last decision; raises
        Undecodable.
        """
        with self._asking("read", self.keys.state):
            meta, tail = await cast(Any, self._commands).hmget(self.keys.state, "meta", "tail")
        try:
            end = streams.position(EntryId(tail or BEGINNING))
        except ValueError as error:
            raise Undecodable(f"state: tail: {error}") from error
        return None if meta is None else codec.from_json(meta, Meta).birth, end

    async def tail(self, stream: str, *, count: int) -> list[Entry]:
        """The newest `count` entries of one of the job's streams (`keys.facts`, `keys.decisions`)."""
        with self._asking("read", stream):
            return await streams.last(self._commands, stream, count=count)

    # --- counters, lease, pulse --------------------------------------------------------------------

    async def issue_run(self, *, floor: int = 0) -> int:
        """A run number above every one issued before and above `floor`."""
        return int(await self._run(self._issue_run, [self.keys.run], [str(floor)]))

    async def take_lease(self, holder: str, *, ttl_ms: int, floor: int = 0) -> Lease | None:
        """The lease under a new epoch above `floor`, or None where somebody holds it."""
        verdict, detail = await self._run(
            self._take, [self.keys.lease, self.keys.epoch, self.keys.state], [holder, str(ttl_ms), str(floor)]
        )
        return Lease(holder, int(detail)) if verdict == "OK" else None

    async def renew_lease(self, lease: Lease, *, ttl_ms: int) -> bool:
        """Whether the lease was still ours and now lasts `ttl_ms` more."""
        return bool(await self._run(self._renew, [self.keys.lease], [lease.value, str(ttl_ms)]))

    async def release_lease(self, lease: Lease) -> None:
        await self._run(self._release, [self.keys.lease], [lease.value])

    async def holder(self) -> str | None:
        """Who holds the lease: `EPOCH:HOLDER`."""
        with self._asking("read", self.keys.lease):
            return cast("str | None", await cast(Any, self._commands).get(self.keys.lease))

    async def pulse(self, source: Source, pulse: Pulse) -> None:
        """Overwrite the source's sign of life."""
        with self._asking("pulse", self.keys.pulse):
            await cast(Any, self._commands).hset(self.keys.pulse, source, codec.to_json(pulse))

    async def pulses(self) -> dict[Source, Pulse]:
        """Every source's last sign of life; what cannot be read is left out."""
        with self._asking("read", self.keys.pulse):
            return pulses_of(await cast(Any, self._commands).hgetall(self.keys.pulse))

    async def still(self, source: Source) -> None:
        """Remove the sign of life of a source that ends cleanly."""
        with self._asking("still", self.keys.pulse):
            await cast(Any, self._commands).hdel(self.keys.pulse, source)

    # --- inside ------------------------------------------------------------------------------------

    async def _read(
        self, stream: str, after: EntryId, reader: Reader | None, block_ms: int | None, count: int
    ) -> list[Entry]:
        if block_ms is not None and reader is None:
            raise ValueError("a blocking read needs a reader's client of its own")
        with self._asking("read", stream):
            return await streams.read(
                reader or self._commands, stream, after=after, block_ms=block_ms, count=count
            )

    async def _run(self, script: Any, script_keys: list[str], args: list[str]) -> Any:
        with self._asking(script.sha, *script_keys):
            return await script(keys=script_keys, args=args)

    def _asking(self, call: str, *touched: str) -> AbstractContextManager[None]:
        return self.bus.asking(f"{call} {touched[0]}", *touched)


def pulses_of(fields: Mapping[str, str]) -> dict[Source, Pulse]:
    """The `pulse` hash as it was read; what cannot be read is left out."""
    found: dict[Source, Pulse] = {}
    for source, text in fields.items():
        try:
            found[Source(source)] = codec.from_json(text, Pulse)
        except Undecodable:
            continue
    return found


def _flat(fields: dict[str, str]) -> list[str]:
    return [text for pair in fields.items() for text in pair]
