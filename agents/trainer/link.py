"""The session's thread on the bus: says facts, follows decisions, pulses. It never touches a tensor.

It has an event loop of its own, so that the application may be a plain script, an asyncio program or a
Ray actor. Everything crosses between threads as immutable values; what it hears goes to one function,
which must not block.
"""

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol, cast

import anyio

from relight.agents.outbox import MemoryOutbox, Publisher
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.follow import RETRY_S, Away, Decided, Event, Follower, Synced
from relight.events.bus.job import JobBus, Pulse
from relight.events.errors import BusUnavailable
from relight.events.facts import Fact
from relight.events.ids import BootId, JobName, trainer_source
from relight.events.schema import Snapshot

log = logging.getLogger(__name__)

PULSE_S = 1.0
"""Between two signs of life. Ten missed ones make a trainer silent."""
STOP_S = 5.0
"""What closing connections may take beyond the flush."""


class _End(NamedTuple):
    """The last thing in the inbox."""

    flush_s: float
    clean: bool


class Listener(Protocol):
    """Who hears what the thread reads. Called in the thread; must not block."""

    def begin(self, run: int) -> None:
        """The run's number, before anything is heard."""
        ...

    def hear(self, event: Event | None) -> None:
        """What the follower met; None when the thread has failed."""
        ...

    def stands(self) -> Fact:
        """How things stand, said instead of all that waits once the outbox is full."""
        ...


class Link:
    """One run's connection. `start` gives the run; `say` is safe from any thread."""

    def __init__(self, url: str, job: JobName, *, listener: Listener) -> None:
        self._url = url
        self._job = job
        self._listener = listener
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bus: Bus | None = None
        self._inbox: asyncio.Queue[Fact | _End] = asyncio.Queue()
        self._flushed = False
        self.seen_at = time.monotonic()
        """When an orchestrator last held the job's lease or decided anything (monotonic, seconds)."""
        self.failure: Exception | None = None
        """What ended the thread before it was told to stop."""

    def start(self, *, within_s: float) -> int:
        """Connect, trying for `within_s`, and take a run number. Raises BusUnavailable or UsageError."""
        started: Future[int] = Future()
        self._thread = threading.Thread(
            target=self._turn, args=(started, within_s), name="relight-bus", daemon=True
        )
        self._thread.start()
        return started.result()

    def say(self, fact: Fact) -> None:
        """Publish `fact` after all that were said before it, as soon as the bus takes it."""
        self._put(fact)

    @property
    def absent_s(self) -> float:
        """Seconds since there was a sign of an orchestrator."""
        return time.monotonic() - self.seen_at

    def seconds_until(self, deadline_ms: int) -> float:
        """Seconds until a deadline in bus time; negative when it has passed."""
        assert self._bus is not None
        return self._bus.clock.seconds_until(deadline_ms)

    def stop(self, *, flush_s: float, clean: bool) -> bool:
        """End the thread; whether all that was said is in the stream. `clean`: take the pulse away too."""
        if self._thread is not None and self._thread.is_alive():
            self._put(_End(flush_s, clean))
            self._thread.join(flush_s + STOP_S)
        return self._flushed

    def _put(self, item: "Fact | _End") -> None:
        if self._loop is not None:
            # A closed loop means that the thread has ended, and `failure` says why.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._inbox.put_nowait, item)

    # --- in the thread -----------------------------------------------------------------------------

    def _turn(self, started: "Future[int]", within_s: float) -> None:
        try:
            anyio.run(self._main, started, within_s, backend_options={"use_uvloop": True})
        except Exception as error:
            cause = _cause(error)
            if not started.done():
                started.set_exception(cause)
                return
            log.error("trainer lost the bus for good", extra={"job": self._job}, exc_info=cause)
            self.failure = cause
            self._listener.hear(None)

    async def _main(self, started: "Future[int]", within_s: float) -> None:
        async with open_bus(self._url, reached=False) as bus:
            self._bus = bus
            job = bus.job(self._job)
            give_up_at = time.monotonic() + within_s
            run = await self._begin(job, give_up_at)
            self._listener.begin(run)
            follower = Follower(job)
            await self._catch_up(follower, give_up_at)
            source = trainer_source(run)
            publisher = Publisher(
                job, MemoryOutbox(collapse=self._listener.stands), source=source, boot=BootId(str(run))
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._pulse, job, run)
                tasks.start_soon(self._follow, follower)
                tasks.start_soon(partial(publisher.run, install=False))
                self._loop = asyncio.get_running_loop()
                started.set_result(run)
                end = await self._take(publisher)
                with anyio.move_on_after(end.flush_s):
                    await publisher.flushed()
                    self._flushed = True
                if end.clean:
                    with suppress(BusUnavailable):
                        await job.still(source)
                tasks.cancel_scope.cancel()

    async def _take(self, publisher: Publisher) -> "_End":
        while True:
            item = await self._inbox.get()
            if isinstance(item, _End):
                return item
            publisher.say(item)

    async def _begin(self, job: JobBus, give_up_at: float) -> int:
        while True:
            try:
                await job.bus.check()
                await job.bus.enrol(job.name)
                return await job.issue_run(floor=_highest_run(await job.snapshot()))
            except BusUnavailable:
                if time.monotonic() >= give_up_at:
                    raise
                await anyio.sleep(RETRY_S[-1])

    async def _catch_up(self, follower: Follower, give_up_at: float) -> None:
        """Know the state before anything is said: no answer can then come before it is listened for."""
        while not isinstance(event := await follower.next(), Synced):
            if time.monotonic() >= give_up_at:
                raise BusUnavailable(
                    event.reason if isinstance(event, Away) else f"job {self._job}: no state"
                )
        self._listener.hear(event)

    async def _follow(self, follower: Follower) -> None:
        while True:
            event = await follower.next()
            if isinstance(event, Decided):
                self.seen_at = time.monotonic()
            self._listener.hear(event)

    async def _pulse(self, job: JobBus, run: int) -> None:
        seq = 0
        while True:
            seq += 1
            try:
                await job.pulse(trainer_source(run), Pulse(BootId(str(run)), seq))
                if await job.holder() is not None:
                    self.seen_at = time.monotonic()
            except BusUnavailable as error:
                log.debug("pulse not sent", extra={"error": str(error)})
            await anyio.sleep(PULSE_S)


def _cause(error: Exception) -> Exception:
    """The one error inside the groups that task groups make of it."""
    inner: Exception = error
    while isinstance(inner, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", inner)
        if len(group.exceptions) != 1:
            return group
        inner = group.exceptions[0]
    return inner


def _highest_run(snapshot: Snapshot) -> int:
    """The highest run that the state names: its counter may have been lost with another server."""
    runs = [engine.version.run for engine in snapshot.engines.values() if engine.version is not None]
    meta = snapshot.meta
    if meta is not None:
        runs += [meta.run, *(weights.run for weights in (meta.version,) if weights is not None)]
        runs += [meta.published.version.run] if meta.published is not None else []
    return max(runs, default=0)
