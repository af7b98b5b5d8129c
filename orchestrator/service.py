"""The process: any number of jobs, each held under a lease of its own, taken when it is free."""

import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from typing import NoReturn

import anyio
from anyio.abc import TaskGroup

from relight.events.bus.client import Bus, open_bus
from relight.events.errors import BusUnavailable, LostLease, Undecodable, UsageError, leaves
from relight.events.ids import JobName
from relight.orchestrator.settings import DEFAULT, SettingsFile
from relight.orchestrator.term import HigherEpochSeen, Term

log = logging.getLogger("relight.orchestrator")

STANDBY_S = 0.25
"""How often a standby looks at a lease that somebody holds: a lease that ends sends no event."""

DISCOVER_S = 1.0
"""How often new jobs are looked for when none was named."""


async def serve(
    *, bus_url: str, jobs: Sequence[JobName] = (), settings: SettingsFile = DEFAULT, observe: bool = False
) -> NoReturn:
    """Decide for `jobs`, or for every job on the bus. Raises BusUnavailable if it was never reached."""
    if observe:
        raise UsageError("observe mode is not available yet")
    async with open_bus(bus_url) as bus, anyio.create_task_group() as tasks:
        orchestrator = Orchestrator(bus, settings)
        for job in jobs:
            await bus.enrol(job)
            tasks.start_soon(orchestrator.hold, job, name=f"job {job}")
        log.info("orchestrator is up holder=%s jobs=%s", orchestrator.holder, ",".join(jobs) or "all")
        if not jobs:
            tasks.start_soon(orchestrator.discover, tasks)
        await anyio.sleep_forever()
    raise AssertionError("unreachable")


class Orchestrator:
    """Who decides here, and by which settings."""

    def __init__(self, bus: Bus, settings: SettingsFile) -> None:
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._bus = bus
        self._settings = settings

    async def discover(self, tasks: TaskGroup) -> NoReturn:
        """Serve every job on the bus, new ones as they appear."""
        known: set[JobName] = set()
        while True:
            try:
                found = await self._bus.jobs()
            except BusUnavailable as error:
                log.warning("jobs cannot be listed error=%s", error)
                found = []
            for job in found:
                if job not in known:
                    known.add(job)
                    tasks.start_soon(self.hold, job, name=f"job {job}")
            await anyio.sleep(DISCOVER_S)

    async def hold(self, name: JobName) -> NoReturn:
        """Term after term, whenever the job's lease is free."""
        floor = 0
        while True:
            try:
                await self._term(name, floor)
            except* HigherEpochSeen as seen:
                floor = max(leaf.epoch for leaf in leaves(seen) if isinstance(leaf, HigherEpochSeen))
                log.warning("term ended job=%s reason=%s", name, leaves(seen)[0])
            except* (LostLease, BusUnavailable, Undecodable) as lost:
                log.warning("term ended job=%s reason=%s", name, leaves(lost)[0])
                await anyio.sleep(STANDBY_S)

    async def _term(self, name: JobName, floor: int) -> None:
        """One term, if the lease is free; otherwise one wait."""
        job, settings = self._bus.job(name), self._settings.of(name)
        taken_at_s = time.monotonic()
        lease = await job.take_lease(self.holder, ttl_ms=int(settings.lease_s * 1000), floor=floor)
        if lease is None:
            await anyio.sleep(STANDBY_S)
            return
        try:
            async with self._bus.reading() as reader:
                await Term(job, lease, settings, reader=reader, taken_at_s=taken_at_s).run()
        finally:
            with anyio.move_on_after(1.0, shield=True):
                await job.release_lease(lease)
