"""Looking at many jobs at once without taking part: what a page that shows a whole cluster asks for.

A slice of jobs is one round trip. Nothing is written; a job that cannot be read is its own answer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import redis.asyncio as redis

from relight.events import codec
from relight.events.bus import scripts
from relight.events.bus.roll import Roll
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.ids import EntryId, JobName
from relight.events.keys import Keys
from relight.events.schema import Snapshot

if TYPE_CHECKING:
    from relight.events.bus.client import Bus

T = TypeVar("T")

SLICE = 64
"""Jobs of one round trip."""

BEHIND_MOST = 1000
"""Facts that wait are counted up to this."""

LOOK_MOST = 1000
"""Entries that one call looks through: some 2 ms of the server's time."""


class Glance(NamedTuple):
    """Where one job stands, without its state."""

    commit: int
    epoch: int
    tail: EntryId
    holder: str | None
    """Who holds the lease: `EPOCH:HOLDER`."""
    lease_left_s: float | None
    """None where nobody holds it."""
    parked: int
    behind: int
    """Facts that no commit has consumed yet, at most BEHIND_MOST."""


class Found(NamedTuple):
    """Entries of the wanted types among those that were looked at."""

    entries: list[Entry]
    last: EntryId
    """The last one that was looked at."""
    more: bool
    """Whether there may be others behind it."""


class Survey(Roll):
    """What `Bus.survey` gives out. Every method raises BusUnavailable where the server cannot serve."""

    def __init__(self, bus: "Bus", commands: "redis.Redis") -> None:
        super().__init__(bus, commands)
        reading = (scripts.GLANCE, scripts.FIND)
        self._shas = {text: str(commands.register_script(text).sha) for text in reading}

    async def glance(self, jobs: Sequence[JobName]) -> list[Glance | BusUnavailable]:
        """Where each job stands, each at one moment of its own."""

        def call(pipe: Any, job: JobName) -> None:
            of = Keys(job)
            self._run(pipe, scripts.GLANCE, [of.state, of.lease, of.facts, of.parked], [BEHIND_MOST])

        replies = await self._of_each("glance", jobs, call)
        return [self._answer("glance", job, reply, _glance) for job, reply in zip(jobs, replies, strict=True)]

    async def states(self, jobs: Sequence[JobName]) -> list[Snapshot | BusUnavailable | Undecodable]:
        """The committed state of each job, each in one reading."""
        replies = await self._of_each("read states", jobs, lambda pipe, job: pipe.hgetall(Keys(job).state))
        states: list[Snapshot | BusUnavailable | Undecodable] = []
        for job, reply in zip(jobs, replies, strict=True):
            try:
                states.append(self._answer("read the state", job, reply, codec.decode_state))
            except Undecodable as error:
                states.append(error)
        return states

    async def decisions(
        self, after: Mapping[JobName, EntryId], *, types: Sequence[str]
    ) -> list[Found | BusUnavailable]:
        """Among the next LOOK_MOST decisions of each job behind `after`, those of `types`."""

        def call(pipe: Any, job: JobName) -> None:
            self._run(pipe, scripts.FIND, [Keys(job).decisions], [after[job], LOOK_MOST, *types])

        jobs = list(after)
        replies = await self._of_each("find decisions", jobs, call)
        return [
            self._answer("find decisions", job, reply, _found)
            for job, reply in zip(jobs, replies, strict=True)
        ]

    async def _of_each(
        self, what: str, jobs: Sequence[JobName], call: Callable[[Any, JobName], object]
    ) -> list[Any]:
        replies: list[Any] = []
        for at in range(0, len(jobs), SLICE):
            some = jobs[at : at + SLICE]

            def calls(pipe: Any, some: Sequence[JobName] = some) -> None:
                for job in some:
                    call(pipe, job)

            replies += await self._pipelined(what, calls)
        return replies

    def _answer(self, call: str, job: JobName, reply: Any, read: Callable[[Any], T]) -> T | BusUnavailable:
        of = Keys(job)
        refused = self._refused(call, job, [reply], of.state, of.facts, of.decisions, of.parked)
        return read(reply) if refused is None else refused


def _glance(reply: Any) -> Glance:
    commit, epoch, tail, holder, left_ms, parked, behind = reply
    return Glance(
        commit=int(commit),
        epoch=int(epoch),
        tail=EntryId(tail),
        holder=holder or None,
        lease_left_s=int(left_ms) / 1000.0 if int(left_ms) >= 0 else None,
        parked=int(parked),
        behind=int(behind),
    )


def _found(reply: Any) -> Found:
    looked_at, last, found = reply
    entries = [codec.entry(name, dict(zip(flat[::2], flat[1::2], strict=True))) for name, flat in found]
    return Found(entries, EntryId(last), more=int(looked_at) == LOOK_MOST)
