"""The process: any number of jobs, each held under a lease of its own, shared with any number of others.

One task looks after the leases it holds, one after those it does not, one says that it is there, and each
held job has its term. A term that fails by a bug ends nothing but itself.
"""

import logging
import os
import resource
import socket
import time
import uuid
from collections.abc import Sequence
from typing import NoReturn

import anyio
from anyio.abc import TaskGroup

from relight.events.bus.client import Bus, open_bus
from relight.events.bus.roll import Asked, Presence
from relight.events.errors import BusUnavailable, LostLease, Undecodable, leaves
from relight.events.ids import JobName
from relight.orchestrator import collecting
from relight.orchestrator.fairness import Lanes
from relight.orchestrator.peers import BEAT_S, Peers
from relight.orchestrator.rounds import Rounds
from relight.orchestrator.seats import Seat
from relight.orchestrator.settings import DEFAULT, SettingsFile
from relight.orchestrator.tenure import Tenure
from relight.orchestrator.term import CAREFUL, HigherEpochSeen, Indigestible, Term

log = logging.getLogger("relight.orchestrator")

TICK_S = 0.05
"""How often it is seen which leases are to be looked at."""

AGAIN_S = 0.2
"""Before the next look while the bus is away."""

SLICE = 64
"""Leases of one round trip."""

BEGINNING = 64
"""Jobs that are taken and not yet taken over, at most: who is slow leaves the others to somebody else, and
goes on renewing what it has."""

LATE_S = 0.5
"""Nothing is taken while renewals are as late as this: what is held comes first, or a process that is too
slow would lose it, take it again, and be slower still."""

ROOM_S = 0.01
"""How often it is seen whether there is room for more."""

DISCOVER_S = 1.0
"""How often new jobs are looked for when none was named."""

HAND_OVER_PAUSE_S = 0.1
"""Between two jobs that are handed over: the heir takes one after the other, and so do their agents."""

HAND_OVER_LOOK_S = 1.0
"""How often it is seen whether any is to be handed over."""

LEAVE_S = 3.0
"""Longest clean end; leases that it could not give up run out by themselves."""


async def serve(*, bus_url: str, jobs: Sequence[JobName] = (), settings: SettingsFile = DEFAULT) -> NoReturn:
    """Decide for `jobs`, or for every job on the bus. Raises BusUnavailable if it was never reached."""
    raise_file_limit()
    async with open_bus(bus_url) as bus:
        for job in jobs:
            await bus.enrol(job)
        orchestrator = Orchestrator(bus, settings, jobs=tuple(jobs) or None)
        log.info("orchestrator is up holder=%s jobs=%s", orchestrator.holder, ",".join(jobs) or "all")
        await orchestrator.run()
    raise AssertionError("unreachable")


def raise_file_limit() -> None:
    """Each held job has a connection for its blocked reader."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Orchestrator:
    """Who decides here, for which jobs (None: all, new ones as they appear), and by which settings."""

    def __init__(self, bus: Bus, settings: SettingsFile, *, jobs: tuple[JobName, ...] | None) -> None:
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._bus = bus
        self._roll = bus.roll()
        self._settings = settings
        self._jobs = jobs
        self._seats = {job: Seat(job, settings.of(job)) for job in jobs or ()}
        self._tenures: dict[JobName, Tenure] = {}
        self._rounds = Rounds(bus, self._tenures)
        self._peers = Peers(self.holder)
        self._lanes = Lanes()
        self._beats = 0
        self._gone: list[str] = []
        self._enrolled = 0
        self._looked_at_once = anyio.Event()

    async def run(self) -> NoReturn:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._be_there)
                tasks.start_soon(self._rounds.run)
                tasks.start_soon(self._hand_over)
                await self._looked_at_once.wait()
                await self._stand_by(tasks)
        finally:
            await self._leave()
        raise AssertionError("unreachable")

    async def _leave(self) -> None:
        """Give up every lease at once, so that others need not wait for their end."""
        with anyio.move_on_after(LEAVE_S, shield=True):
            held = [(tenure.job, tenure.lease) for tenure in self._tenures.values()]
            try:
                for at in range(0, len(held), SLICE):
                    await self._roll.release(held[at : at + SLICE])
                await self._roll.leave(self.holder)
            except BusUnavailable as error:
                log.warning("leases were not given up, they run out error=%s", error)

    # --- who is there, and which jobs there are ----------------------------------------------------

    async def _be_there(self) -> NoReturn:
        """Show that we are there, see who else is, and which jobs there are."""
        while True:
            began_s = time.monotonic()
            self._beats += 1
            try:
                beat = await self._roll.beat(self.holder, Presence(self._beats, self._jobs), gone=self._gone)
                self._gone = self._peers.look(beat.orchestrators, now_s=time.monotonic())
                if beat.jobs != self._enrolled:
                    await self._discover()
                    self._enrolled = beat.jobs
            except BusUnavailable:
                pass  # the bus tells once what is wrong with it
            self._looked_at_once.set()
            collecting.expect(len(self._seats))
            await anyio.sleep(max(0.0, began_s + BEAT_S - time.monotonic()))

    async def _discover(self) -> None:
        """Take up jobs that are new, and enrol again those that the bus has lost."""
        enrolled = await self._bus.jobs()
        for job in enrolled if self._jobs is None else ():
            self._seats.setdefault(job, Seat(job, self._settings.of(job)))
        for job in self._seats.keys() - set(enrolled):
            await self._bus.enrol(job)

    # --- leases of others --------------------------------------------------------------------------

    async def _stand_by(self, tasks: TaskGroup) -> NoReturn:
        """Take each lease that is free, or free for long enough where another one is preferred."""
        while True:
            now_s = time.monotonic()
            open_ = [
                seat
                for seat in self._seats.values()
                if seat.job not in self._tenures and now_s >= seat.look_at_s
            ]
            try:
                for at in range(0, len(open_), SLICE):
                    await self._look(open_[at : at + SLICE], tasks)
            except BusUnavailable:
                await anyio.sleep(AGAIN_S)
            await anyio.sleep(TICK_S)

    async def _look(self, seats: Sequence[Seat], tasks: TaskGroup) -> None:
        holders = await self._roll.holders([seat.job for seat in seats])
        now_s = time.monotonic()
        wanted = [
            seat
            for seat, holder in zip(seats, holders, strict=True)
            if seat.shown(holder, self._peers, now_s=now_s)
        ]
        while wanted:
            room = BEGINNING - sum(tenure.stands is None for tenure in self._tenures.values())
            if room > 0 and self._rounds.late_s < LATE_S:
                await self._take(wanted[:room], tasks)
                del wanted[:room]
            else:
                await anyio.sleep(ROOM_S)

    async def _take(self, seats: Sequence[Seat], tasks: TaskGroup) -> None:
        asked_at_s = time.monotonic()
        asked = [Asked(seat.job, int(seat.settings.lease_s * 1000), seat.floor) for seat in seats]
        leases, stamp = await self._roll.take(asked, holder=self.holder)
        for seat, lease in zip(seats, leases, strict=True):
            if isinstance(lease, BusUnavailable):
                seat.refused(now_s=asked_at_s)
            elif lease is not None:
                tenure = Tenure(seat.job, lease, seat.settings, stamp=stamp, asked_at_s=asked_at_s)
                self._tenures[seat.job] = tenure
                tasks.start_soon(self._term, seat, tenure, name=f"job {seat.job}")

    # --- terms -------------------------------------------------------------------------------------

    async def _term(self, seat: Seat, tenure: Tenure) -> None:
        """One term, to its end for whatever reason; then the lease is free."""
        began_s = time.monotonic()
        try:
            with tenure.scope:
                term = Term(
                    self._bus.job(seat.job),
                    tenure,
                    lanes=self._lanes,
                    passed_over=seat.passed_over,
                    one_by_one=CAREFUL if seat.careful else 0,
                )
                await term.run()
            tenure.check()
        except* HigherEpochSeen as seen:
            seat.floor = max(leaf.epoch for leaf in leaves(seen) if isinstance(leaf, HigherEpochSeen))
            log.warning("term ended job=%s reason=%s", seat.job, leaves(seen)[0])
        except* (LostLease, BusUnavailable) as lost:
            log.warning("term ended job=%s reason=%s", seat.job, leaves(lost)[0])
            seat.lost(now_s=time.monotonic())
        except* Exception as failure:  # noqa: BLE001 -- whatever it is, it is this job's alone
            self._failed(seat, leaves(failure)[0], lasted_s=time.monotonic() - began_s)
        tenure.end("its term ended")
        await self._given_back(seat, tenure)

    def _failed(self, seat: Seat, error: BaseException, *, lasted_s: float) -> None:
        """A bug, or a state that nobody can read: told with its place, and never more than this job's."""
        on = error.entry_id if isinstance(error, Indigestible) else None
        wait_s = seat.failed(on, lasted_s=lasted_s, now_s=time.monotonic())
        log.error(
            "ALARM term failed job=%s error=%s: the job stands still; it is tried again in %g s",
            seat.job,
            error,
            wait_s,
            exc_info=None if isinstance(error, Undecodable) else error,
        )

    async def _given_back(self, seat: Seat, tenure: Tenure) -> None:
        try:
            async with self._lanes.commands:
                await self._roll.release([(tenure.job, tenure.lease)])
        except BusUnavailable:
            pass  # it runs out by itself
        del self._tenures[seat.job]

    async def _hand_over(self) -> NoReturn:
        """Give jobs to those who shall have them, one after the other."""
        while True:
            handed_over = self._hand_one_over()
            await anyio.sleep(HAND_OVER_PAUSE_S if handed_over else HAND_OVER_LOOK_S)

    def _hand_one_over(self) -> bool:
        now_s = time.monotonic()
        for job, tenure in self._tenures.items():
            seat = self._seats[job]
            heir = seat.heir(self._peers, stands=tenure.stands, now_s=now_s)
            if heir is not None and tenure.over is None:
                log.info("job handed over job=%s to=%s", job, heir)
                tenure.end(f"it is handed over to {heir}")
                seat.handed_over(now_s=now_s)
                return True
        return False
