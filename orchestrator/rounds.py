"""What all held jobs need each second, done once for the process and in slices of many jobs each.

Every look renews the lease and reads the pulses, so that a second of a thousand jobs is some sixty round
trips, spread over the second by when each job's last look was. A look that fails is soon repeated. A tenure
that runs out is ended by this process's own clock alone.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import anyio

from relight.events.bus.client import Bus
from relight.events.bus.roll import Held, Looked
from relight.events.errors import BusUnavailable
from relight.events.ids import JobName
from relight.orchestrator.tenure import FORGET_S, TRIM_S, Tenure

log = logging.getLogger("relight.orchestrator")

TICK_S = 0.025
"""How often it is seen whose look is due: a thousand jobs are spread over forty ticks."""

SLICE = 16
"""Jobs of one round trip: about 1 ms of the loop's time."""

AT_A_TIME = 3
"""Slices under way: while the bus is slow others need not wait for the first one's answer. More than these
hold are due only when all are late; then slices grow, since a slow loop takes long for each answer."""

AGAIN_S = 0.2
"""A look that failed is repeated after this."""

SERVER_S = 1.0
"""How often the server is asked for its time and its identity."""


class Rounds:
    """The periodic calls for `tenures`, which others add to and take from."""

    def __init__(self, bus: Bus, tenures: Mapping[JobName, Tenure]) -> None:
        self._bus = bus
        self._roll = bus.roll()
        self._tenures = tenures
        self.late_s = 0.0
        """By how much the renewal that waits longest is late."""
        self._slots = anyio.Semaphore(AT_A_TIME, fast_acquire=True)

    async def run(self) -> NoReturn:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._ask_the_server)
            while True:
                due = self._due(time.monotonic())
                size = max(SLICE, -(-len(due) // AT_A_TIME))
                for at in range(0, len(due), size):
                    tasks.start_soon(self._look, due[at : at + size])
                await anyio.sleep(TICK_S)
        raise AssertionError("unreachable")

    def _due(self, now_s: float) -> list[Tenure]:
        """Those to look at now, the one that waits longest first; what has run out ends here."""
        due: list[Tenure] = []
        self.late_s = 0.0
        for tenure in self._tenures.values():
            tenure.expire(now_s)
            self.late_s = max(self.late_s, now_s - tenure.renewed_at_s - tenure.every_s)
            if tenure.over is None and now_s >= tenure.look_at_s:
                due.append(tenure)
        due.sort(key=lambda tenure: tenure.look_at_s)
        for tenure in due:
            tenure.look_at_s = float("inf")  # until this look has come back
        return due

    async def _look(self, tenures: Sequence[Tenure]) -> None:
        async with self._slots:
            asked_at_s = time.monotonic()
            held = [_asked(tenure, asked_at_s) for tenure in tenures]
            committed = [tenure.committed for tenure in tenures]
            looks: Sequence[Looked | BusUnavailable]
            try:
                looks = await self._roll.look(held)
            except BusUnavailable as error:
                looks = [error] * len(held)
        for tenure, asked, before, look in zip(tenures, held, committed, looks, strict=True):
            if isinstance(look, BusUnavailable):
                tenure.saw_nothing()
                tenure.look_at_s = time.monotonic() + AGAIN_S
            elif not look.renewed:
                tenure.end("the bus does not hold it any more")
            else:
                _looked(tenure, asked, look, asked_at_s=asked_at_s)
                tenure.compare(before, asked, look)
                await self._forget(tenure, look)

    async def _forget(self, tenure: Tenure, look: Looked) -> None:
        """Drop what will not speak again from `seen` and `pulse`."""
        if look.seen is None or look.pulses is None or tenure.stands is None:
            return
        gone = tenure.sources.gone(tenure.stands, seen=look.seen, pulses=look.pulses, now_s=time.monotonic())
        if not gone:
            return
        with suppress(BusUnavailable):  # the next look finds them again
            await self._roll.forget(tenure.job, tenure.lease, sources=gone)
            log.info("sources forgotten job=%s sources=%s", tenure.job, ",".join(sorted(gone)))

    async def _ask_the_server(self) -> NoReturn:
        """Bus time, and whether it still is the server that gave the leases."""
        while True:
            with suppress(BusUnavailable):
                await self._bus.tell_time()
                stamp = await self._bus.stamp()
                for tenure in list(self._tenures.values()):
                    if tenure.stamp != stamp:
                        tenure.end("the bus is another server than before")
            await anyio.sleep(SERVER_S)


def _looked(tenure: Tenure, asked: Held, look: Looked, *, asked_at_s: float) -> None:
    tenure.renewed(asked_at_s=asked_at_s)
    if look.pulses is None:
        tenure.saw_nothing()
    else:
        tenure.saw(look.pulses, now_s=asked_at_s)
    tenure.look_at_s = asked_at_s + tenure.every_s
    if asked.trim is not None:
        tenure.trim_at_s = asked_at_s + TRIM_S
    if asked.seen:
        tenure.forget_at_s = asked_at_s + FORGET_S


def _asked(tenure: Tenure, now_s: float) -> Held:
    return Held(
        tenure.job,
        tenure.lease,
        int(tenure.settings.lease_s * 1000),
        anchor=tenure.anchor,
        trim=tenure.settings.keep_entries if now_s >= tenure.trim_at_s else None,
        cursor=tenure.committed.cursor,
        seen=now_s >= tenure.forget_at_s,
    )
