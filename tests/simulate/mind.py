"""An orchestrator's process: the real term under the real tenure and its rounds, and the real core in it.

`service.Orchestrator` and `Rounds.run` poll for a thousand jobs at a time; what they do for one job is
mirrored here without their ticks: a free lease is taken at the next look, a held one is looked at when that
is due, and a term that ends gives its lease back. Who of two orchestrators is preferred is left to chance:
the lease decides.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from relight.events.bus.client import Bus
from relight.events.bus.roll import Asked, Roll
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, LostLease, leaves
from relight.events.ids import EntryId
from relight.events.keys import Keys
from relight.orchestrator.core.job import Job as CoreJob
from relight.orchestrator.core.job import Step
from relight.orchestrator.fairness import Lanes
from relight.orchestrator.rounds import Rounds
from relight.orchestrator.seats import is_settled
from relight.orchestrator.tenure import Tenure
from relight.orchestrator.term import HigherEpochSeen, Term
from tests.simulate.flow import Group, Scope
from tests.simulate.kernel import Process
from tests.simulate.link import Link
from tests.simulate.rules import Intended

if TYPE_CHECKING:
    from tests.simulate.world import Job, World

LOOK_S = 0.2
AGAIN_S = 0.2


class Mind:
    """One orchestrator, over all of its lives. It serves every job."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.lives = 0
        self.process: Process | None = None
        self.link: Link | None = None
        self.tenures: dict[str, Tenure] = {}

    def start(self) -> None:
        world = self.world
        self.lives += 1
        process = self.process = world.process(f"{self.name}-{self.lives}")
        process.failed = world.broke
        link = self.link = world.link(process)
        self.tenures = {}
        bus = Bus("redis://bus", link.connect)
        work = _Work(bus, bus.roll(), Lanes(), Rounds(bus, self.tenures))
        process.spawn(work.rounds._ask_the_server())
        for job in world.jobs:
            process.spawn(self._serve(job, work), tag=job.name)

    def crash(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.process = None
        self.tenures = {}

    def hand_over(self, job: "Job") -> bool:
        """Give a job up where nothing is under way, as one does who is not preferred; whether it was."""
        tenure = self.tenures.get(job.name)
        if tenure is None or tenure.stands is None or not is_settled(tenure.stands):
            return False
        tenure.end("it is handed over")
        return True

    async def _serve(self, job: "Job", work: "_Work") -> NoReturn:
        """`Orchestrator._stand_by`, `_look` and `_take` for one job."""
        key, floor = Keys(job.name).lease, 0
        ttl_ms = int(job.settings.lease_s * 1000)
        while True:
            await self.world.network.polled(key, LOOK_S)
            asked_at_s = self.world.flow.monotonic()
            try:
                [lease], stamp = await work.roll.take([Asked(job.name, ttl_ms, floor)], holder=self.name)
                if lease is None or isinstance(lease, BusUnavailable):
                    continue
                await work.bus.tell_time()
            except BusUnavailable:
                await self.world.flow.sleep(AGAIN_S)
                continue
            job.judge.took(lease.epoch)
            tenure = Tenure(job.name, lease, job.settings, stamp=stamp, asked_at_s=asked_at_s)
            self.tenures[job.name] = tenure
            floor = await self._term(WatchedTerm(job, work, tenure), work, floor)
            del self.tenures[job.name]

    async def _term(self, one: "WatchedTerm", work: "_Work", floor: int) -> int:
        """`Orchestrator._term`; the floor of the next epoch."""
        tenure = one.tenure
        try:
            with tenure.scope:
                async with Group(self.world.kernel) as tasks:
                    tasks.start_soon(self._look, work.rounds, tenure)
                    await one.run()
            tenure.check()
        except* HigherEpochSeen as seen:
            floor = max(leaf.epoch for leaf in leaves(seen) if isinstance(leaf, HigherEpochSeen))
        except* (LostLease, BusUnavailable):
            pass
        tenure.end("its term ended")
        with suppress(BusUnavailable), Scope(self.world.kernel, delay=1.0):
            await work.roll.release([(tenure.job, tenure.lease)])
        return floor

    async def _look(self, rounds: Rounds, tenure: Tenure) -> None:
        """`Rounds.run` for one tenure, at the moment when its look is due."""
        while True:
            due_s = min(tenure.look_at_s, self.world.flow.monotonic() + LOOK_S)
            await self.world.flow.sleep(due_s - self.world.flow.monotonic())
            now_s = self.world.flow.monotonic()
            tenure.expire(now_s)
            if now_s >= tenure.look_at_s:
                tenure.look_at_s = float("inf")
                await rounds._look([tenure])


class _Work(NamedTuple):
    """What an orchestrator's tasks share."""

    bus: Bus
    roll: Roll
    lanes: Lanes
    rounds: Rounds


class WatchedTerm(Term):
    """The real term, which tells the judge what it is about to commit."""

    def __init__(self, job: "Job", work: _Work, tenure: Tenure) -> None:
        super().__init__(work.bus.job(job.name), tenure, lanes=work.lanes)
        self.tenure = tenure
        self._job = job
        self._first: EntryId | None = None
        """The first fact of this turn, until it is committed."""

    async def _turn(self, job: CoreJob, entries: Sequence[Entry]) -> CoreJob:
        self._first = entries[0].entry_id if entries else None
        return await super()._turn(job, entries)

    async def _commit(self, decided: Step, cursor: EntryId) -> None:
        number, first, self._first = self._number + 1, self._first, None
        intended = Intended(decided, cursor, first, self._job.kernel.now, self._now())
        self._job.judge.intends(self.tenure.lease.epoch, number, intended)
        await super()._commit(decided, cursor)
        self._job.judge.believes(self.tenure.lease.epoch, number)
