"""What is read as long as somebody looks: of one job its streams and its state, of the bus all jobs.

However many look at a job, one follower reads its streams. It begins with the first who looks and ends some
seconds after the last one, so that a page that is loaded again finds it.
"""

import time
from collections.abc import Callable
from typing import Any, NoReturn

import anyio

from relight.events import codec
from relight.events.bus.client import Bus
from relight.events.bus.follow import Away
from relight.events.errors import BusUnavailable
from relight.events.ids import JobName
from relight.orchestrator.annals import Annals
from relight.orchestrator.dashboard import frames
from relight.orchestrator.dashboard.census import Census, Standing
from relight.orchestrator.dashboard.channel import Channel, Subscription
from relight.orchestrator.dashboard.rows import PHASES, Row, lasting, row
from relight.orchestrator.dashboard.tape import Tape, as_line
from relight.orchestrator.dashboard.trail import Back, Began, Came, Trail
from relight.orchestrator.views import JobView

LOOK_S = 1.0
"""How often the state is looked at although nothing came: a lease that ends says nothing."""

LEAST_S = 0.25
"""Between two looks, whatever comes."""

SHOWN = 200
"""Entries that a page begins with."""

PAST_SHOWN = 60
"""Ended recoveries and alarms of a page."""


class Trouble:
    """Why nothing new can be shown, and since when."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._since_s = 0.0

    def set(self, what: str, reason: str | None) -> bool:
        """`what` cannot be had for this reason, or can be had; whether that is news."""
        if self._reasons.get(what) == reason:
            return False
        if reason is None:
            del self._reasons[what]
            return True
        if not self._reasons:
            self._since_s = time.monotonic()
        self._reasons[what] = reason
        return True

    def frame(self) -> bytes:
        reason = next(iter(self._reasons.values()), None)
        for_s = None if reason is None else time.monotonic() - self._since_s
        return frames.event("bus", {"away": reason is not None, "reason": reason, "for_s": for_s})


class Watch:
    """Those who look at one thing, and what they are told."""

    def __init__(self) -> None:
        self.channel = Channel()
        self.scope = anyio.CancelScope()
        self.trouble = Trouble()

    async def run(self) -> NoReturn:
        raise NotImplementedError

    def greet(self, reader: Subscription) -> None:
        """Tell a new reader all there is."""
        raise NotImplementedError

    def _is(self, what: str, reason: str | None) -> None:
        if self.trouble.set(what, reason):
            self.channel.show("bus", self.trouble.frame())

    async def _look_on(self, look: Callable[[], Any], stirred: Callable[[], Any]) -> NoReturn:
        """Look again and again, as soon as something stirs."""
        while True:
            try:
                await look()
                self._is("state", None)
            except BusUnavailable as error:
                self._is("state", str(error))
            with anyio.move_on_after(LOOK_S - LEAST_S):
                await stirred()
            await anyio.sleep(LEAST_S)


class JobWatch(Watch):
    """One job."""

    def __init__(self, job: JobName, bus: Bus, census: Census) -> None:
        super().__init__()
        self.job = job
        self._census = census
        self._trail = Trail(bus.job(job), count=SHOWN)
        self._tape: Tape | None = None
        self._view: JobView | None = None
        self._shown: Any = None
        self._past: bytes | None = None
        self._stirred = anyio.Event()

    async def run(self) -> NoReturn:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow)
            await self._look_on(self._look, self._has_stirred)
        raise AssertionError("unreachable")

    def greet(self, reader: Subscription) -> None:
        reader.show("bus", self.trouble.frame())
        if self._view is not None:
            reader.show("view", frames.event("view", self._view))
        if self._past is not None:
            reader.show("past", self._past)
        if self._tape is not None:
            _play(self._tape, reader)

    # --- the streams -------------------------------------------------------------------------------

    async def _follow(self) -> NoReturn:
        while True:
            match await self._trail.next():
                case Began(birth, entries):
                    self._tape = Tape(birth, entries)
                    self._is("streams", None)
                    for reader in self.channel.readers:
                        _play(self._tape, reader)
                    self._stirred.set()
                case Came(entries, missed):
                    assert self._tape is not None
                    self._tape.add(entries)
                    self.channel.put(_came(self._tape, entries, missed=missed))
                    self._stirred.set()
                case Away(reason):
                    self._is("streams", reason)
                case Back():
                    self._is("streams", None)
                case _:
                    pass

    # --- the state ---------------------------------------------------------------------------------

    async def _has_stirred(self) -> None:
        await self._stirred.wait()
        self._stirred = anyio.Event()

    async def _look(self) -> None:
        [standing] = await self._census.look([self.job])
        self._show(standing)

    def _show(self, standing: Standing) -> None:
        if not isinstance(standing.view, JobView):
            self._is("job", str(standing.view))
            return
        self._is("job", None)
        self._view = standing.view
        shown = codec.to_json(_still(self._view))
        if shown != self._shown:
            self._shown = shown
            self.channel.show("view", frames.event("view", self._view))
        past = frames.event("past", past_of(standing.annals))
        if past != self._past:
            self._past = past
            self.channel.show("past", past)


def past_of(annals: Annals) -> dict[str, Any]:
    """What a page shows of what is over, the newest first."""
    return {
        "outcomes": annals.outcomes,
        "recoveries": list(annals.recoveries)[: -PAST_SHOWN - 1 : -1],
        "alarms": list(annals.alarmed)[: -PAST_SHOWN - 1 : -1],
        "alarms_by_kind": annals.alarms,
    }


def _play(tape: Tape, reader: Subscription) -> None:
    """Tell a reader what is behind its place; the newest entries where that is not known here."""
    place, reader.place = reader.place, None
    behind = None if place is None else tape.since(place)
    if behind is None:
        lines = [as_line(entry) for entry in tape.newest(SHOWN)]
        reader.put(frames.event("begin", {"entries": lines}, place=str(tape.place)))
    elif behind:
        reader.put(_came(tape, behind, missed=False))


def _came(tape: Tape, entries: Any, *, missed: bool) -> bytes:
    lines = [as_line(entry) for entry in entries]
    return frames.event("entries", {"entries": lines, "missed": missed}, place=str(tape.place))


def _still(view: JobView) -> tuple[Any, ...]:
    """What of a view does not move with time alone."""
    held = view.holder is not None
    return view.epoch, view.commit, view.holder, held, view.parked, view.behind, _told(view)


def _told(view: JobView) -> list[tuple[str, str, str | None]]:
    return [(concern.kind, concern.level, concern.of) for concern in view.concerns]


class Overview(Watch):
    """All jobs of the bus."""

    def __init__(self, census: Census) -> None:
        super().__init__()
        self._census = census
        self._rows: dict[JobName, Row] | None = None

    async def run(self) -> NoReturn:
        await self._look_on(self._look, anyio.sleep_forever)

    def greet(self, reader: Subscription) -> None:
        reader.show("bus", self.trouble.frame())
        if self._rows is not None:
            told = {"phases": PHASES, "rows": list(self._rows.values())}
            reader.put(frames.event("jobs", told))

    async def _look(self) -> None:
        standings = await self._census.look(await self._census.jobs())
        rows = {standing.job: row(standing) for standing in standings}
        if self._rows is None:
            self._rows = rows
            for reader in self.channel.readers:
                self.greet(reader)
            return
        before, self._rows = self._rows, rows
        changed = [
            new for job, new in rows.items() if job not in before or lasting(before[job]) != lasting(new)
        ]
        gone = sorted(before.keys() - rows.keys())
        if changed or gone:
            self.channel.put(frames.event("changed", {"rows": changed, "gone": gone}))
