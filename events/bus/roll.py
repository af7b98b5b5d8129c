"""Calls over many jobs at once: what a process that holds a thousand of them asks for each second.

A slice of jobs is one round trip on one connection. Each call in it is still one atomic step on one job's
keys, so a slice that was half done may be asked for again whole. Besides, the orchestrators' own key: who of
them is there, in a slot of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import redis.asyncio as redis
from redis.exceptions import NoScriptError

from relight.events import codec, keys
from relight.events.bus import scripts
from relight.events.bus.job import Lease, Pulse, pulses_of
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.ids import BEGINNING, EntryId, JobName, Source
from relight.events.keys import Keys

if TYPE_CHECKING:
    from relight.events.bus.client import Bus


class Presence(msgspec.Struct, frozen=True):
    """An orchestrator's sign of life."""

    seq: int
    """Advances with each beat."""
    jobs: tuple[JobName, ...] | None = None
    """Those it decides for; None: all."""


class Asked(NamedTuple):
    """A lease that is wanted."""

    job: JobName
    ttl_ms: int
    floor: int
    """The new epoch lies above it."""


class Held(NamedTuple):
    """A lease that is held, and what is asked for besides its renewal."""

    job: JobName
    lease: Lease
    ttl_ms: int
    anchor: EntryId = BEGINNING
    """A fact that must stand in the stream."""
    trim: int | None = None
    """Trim both streams to about so many entries."""
    cursor: EntryId = BEGINNING
    """A fact that is looked for after the trim."""
    seen: bool = False
    """Read `seen` too."""


class Looked(NamedTuple):
    """What one look at a held job shows."""

    renewed: bool
    pulses: dict[Source, Pulse] | None
    """None where they cannot be read."""
    seen: dict[Source, str] | None
    """None where it was not asked for or cannot be read."""
    commit: int | None = None
    """The state's commit number, 0 where there is no state; None where it cannot be read."""
    has_anchor: bool | None = None
    """Whether the anchor stands in the stream; None where that cannot be read."""
    has_cursor: bool | None = None
    """Whether the cursor stood there after the trim; None where it was not asked for or cannot be read."""


class Beat(NamedTuple):
    """What one beat shows."""

    orchestrators: dict[str, Presence]
    jobs: int
    """How many are enrolled."""


class Roll:
    """What `Bus.roll` gives out. Every method raises BusUnavailable where the server cannot serve; what it
    refuses for one job only (a key that holds something else) is that job's answer, and no other one's.
    """

    def __init__(self, bus: "Bus", commands: "redis.Redis") -> None:
        self._bus = bus
        self._commands = commands
        self._shas = {
            text: str(commands.register_script(text).sha)
            for text in (scripts.TAKE, scripts.RENEW, scripts.RELEASE, scripts.TRIM, scripts.FORGET)
        }

    async def take(
        self, asked: Sequence[Asked], *, holder: str
    ) -> tuple[list[Lease | BusUnavailable | None], str]:
        """For each the lease under a new epoch, or None where somebody holds it; and the server's stamp,
        told on the same connection: it is the stamp of the very server that gave the leases. The jobs are
        enrolled again: the bus may have been emptied."""

        def calls(pipe: Any) -> None:
            for job, ttl_ms, floor in asked:
                of = Keys(job)
                self._run(pipe, scripts.TAKE, [of.lease, of.epoch, of.state], [holder, ttl_ms, floor])
            pipe.sadd(keys.JOBS, *(job for job, _, _ in asked))
            pipe.info()

        *replies, _, info = await self._pipelined("take leases", calls)
        taken: list[Lease | BusUnavailable | None] = []
        for (job, _, _), reply in zip(asked, replies, strict=True):
            refused = self._refused("take a lease", job, [reply], Keys(job).epoch, Keys(job).state)
            if refused is None and reply[0] == "OK":
                taken.append(Lease(holder, int(reply[1])))
            else:
                taken.append(refused)
        return taken, "none" if isinstance(info, Exception) else stamp_of(info)

    async def look(self, held: Sequence[Held]) -> list[Looked | BusUnavailable]:
        """Renew each lease, read the job's pulses, and see whether state and facts are still there."""

        def calls(pipe: Any) -> None:
            for job, lease, ttl_ms, anchor, trim, cursor, seen in held:
                of = Keys(job)
                self._run(pipe, scripts.RENEW, [of.lease], [lease.value, ttl_ms])
                pipe.hgetall(of.pulse)
                pipe.hget(of.state, "commit")
                pipe.xrange(of.facts, anchor, anchor, count=1)
                if seen:
                    pipe.hgetall(of.seen)
                if trim is not None:
                    streams = [of.lease, of.state, of.facts, of.decisions]
                    self._run(pipe, scripts.TRIM, streams, [lease.value, trim])
                    pipe.xrange(of.facts, cursor, cursor, count=1)

        replies = iter(await self._pipelined("look", calls))
        looks: list[Looked | BusUnavailable] = []
        for one in held:
            renewed, *others = islice(replies, 4 + one.seen + 2 * (one.trim is not None))
            refused = self._refused("renew a lease", one.job, [renewed])
            if refused is not None:
                looks.append(refused)
            elif self._refused("look", one.job, others, *_looked_at(one.job)) is not None:
                looks.append(Looked(bool(renewed), None, None))
            else:
                pulses, commit, at_anchor, *more = others
                seen = more[0] if one.seen else None
                number = int(commit or 0) if str(commit or 0).isdecimal() else None
                at_cursor = bool(more[-1]) if one.trim is not None else None
                told = Looked(bool(renewed), pulses_of(pulses), seen, number, bool(at_anchor), at_cursor)
                looks.append(told)
        return looks

    async def holders(self, jobs: Sequence[JobName]) -> list[str | None]:
        """Who holds each job's lease (without the epoch); None where it is free."""
        leases = [Keys(job).lease for job in jobs]
        with self._bus.asking("read leases"):
            values = await cast(Any, self._commands).mget(leases)
        return [None if value is None else str(value).partition(":")[2] for value in values]

    async def release(self, leases: Sequence[tuple[JobName, Lease]]) -> None:
        """Give up those that are still ours."""

        def calls(pipe: Any) -> None:
            for job, lease in leases:
                self._run(pipe, scripts.RELEASE, [Keys(job).lease], [lease.value])

        replies = await self._pipelined("release leases", calls)
        for (job, _), reply in zip(leases, replies, strict=True):
            self._refused("release a lease", job, [reply])

    async def forget(self, job: JobName, lease: Lease, *, sources: Mapping[Source, str]) -> int:
        """Drop sources from `seen` and `pulse`, each only while `seen` still holds the value given (empty:
        none); how many were dropped, -1 where the lease is no longer ours."""
        of = Keys(job)
        args = [lease.value, *(text for pair in sources.items() for text in pair)]
        [gone] = await self._pipelined(
            "forget", lambda pipe: self._run(pipe, scripts.FORGET, [of.lease, of.seen, of.pulse], args)
        )
        refused = self._refused("forget", job, [gone], of.seen, of.pulse)
        if refused is not None:
            raise refused
        return int(gone)

    async def beat(self, holder: str, presence: Presence, *, gone: Sequence[str]) -> Beat:
        """Say that `holder` is there, remove those that are `gone`, and see who else there is."""

        def calls(pipe: Any) -> None:
            pipe.hset(keys.ORCHESTRATORS, holder, codec.to_json(presence))
            if gone:
                pipe.hdel(keys.ORCHESTRATORS, *gone)
            pipe.hgetall(keys.ORCHESTRATORS)
            pipe.scard(keys.JOBS)

        with self._bus.asking("beat", keys.ORCHESTRATORS, keys.JOBS):
            *_, told, jobs = _all_served(await self._pipelined("beat", calls))
        found: dict[str, Presence] = {}
        for name, text in told.items():
            try:
                found[name] = codec.from_json(text, Presence)
            except Undecodable:
                found[name] = Presence(0)  # it never advances, and is removed in time
        return Beat(found, int(jobs))

    async def leave(self, holder: str) -> None:
        """`holder` ends."""
        with self._bus.asking("leave", keys.ORCHESTRATORS):
            await cast(Any, self._commands).hdel(keys.ORCHESTRATORS, holder)

    # --- inside ------------------------------------------------------------------------------------

    def _run(self, pipe: Any, script: str, script_keys: Sequence[str], args: Sequence[str | int]) -> None:
        pipe.evalsha(self._shas[script], len(script_keys), *script_keys, *args)

    async def _pipelined(self, call: str, calls: Callable[[Any], object]) -> list[Any]:
        """The replies to `calls`, those that were refused as errors among them."""
        with self._bus.asking(f"{call}, sent together"):
            replies = await self._executed(calls)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                for text in self._shas:
                    await cast(Any, self._commands).script_load(text)
                replies = await self._executed(calls)
            return replies

    async def _executed(self, calls: Callable[[Any], object]) -> list[Any]:
        async with cast(Any, self._commands).pipeline(transaction=False) as pipe:
            calls(pipe)
            return cast("list[Any]", await pipe.execute(raise_on_error=False))

    def _refused(
        self, call: str, job: JobName, replies: Sequence[Any], *beside: str
    ) -> BusUnavailable | None:
        """What the server refused among one job's replies to a call that touches its lease and `beside`."""
        try:
            with self._bus.asking(f"{call} of {job}", Keys(job).lease, *beside):
                _all_served(replies)
        except BusUnavailable as error:
            return error
        return None


def _looked_at(job: JobName) -> tuple[str, ...]:
    of = Keys(job)
    return of.pulse, of.state, of.facts, of.seen, of.decisions


def _all_served(replies: Sequence[Any]) -> Sequence[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def stamp_of(info: Mapping[str, Any]) -> str:
    """What changes when the server is another one: run id and replication id, or `none`."""
    return f"{info['run_id']}:{info.get('master_replid', '')}" if "run_id" in info else "none"
