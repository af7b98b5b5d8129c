"""What is answered. Jobs, events and recoveries are told as `relight status`, `events` and `explain` tell
them with `--format json`.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping

import anyio
from aiohttp import web

from relight.events import codec, exposition
from relight.events.bus.client import Bus
from relight.events.bus.errors import shown
from relight.events.bus.journal import Journal
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, UsageError
from relight.events.ids import EngineName, JobName, RecoveryId, job_name
from relight.orchestrator import chronicle, metrics
from relight.orchestrator.dashboard import files, live
from relight.orchestrator.dashboard.census import Census, Standing, viewed
from relight.orchestrator.dashboard.files import File
from relight.orchestrator.dashboard.guard import as_json, told
from relight.orchestrator.dashboard.hub import Hub
from relight.orchestrator.dashboard.rows import PHASES, row
from relight.orchestrator.dashboard.tape import Place, as_line
from relight.orchestrator.dashboard.watches import past_of
from relight.orchestrator.views import JobView

WINDOW = 20_000
"""Newest entries of each stream that are looked through, as by the commands."""

EVENTS_MOST = 2_000
"""Entries of one answer."""

CHAINS_KEPT = 64
"""Ended recoveries whose chain is not read again."""


class Site:
    """The routes of one dashboard."""

    def __init__(self, bus: Bus, census: Census, hub: Hub, page: Mapping[str, File]) -> None:
        self._bus = bus
        self._census = census
        self._hub = hub
        self._files = page
        self._reading = anyio.Lock()
        self._chains: OrderedDict[tuple[JobName, str], bytes] = OrderedDict()

    def table(self) -> list[tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]]:
        """Path and route."""
        return [
            ("/", self.index),
            ("/static/{name}", self.static),
            ("/api/jobs", self.jobs),
            ("/api/live", self.live),
            ("/api/jobs/{job}", self.job),
            ("/api/jobs/{job}/live", self.job_live),
            ("/api/jobs/{job}/events", self.events),
            ("/api/jobs/{job}/recoveries", self.recoveries),
            ("/api/jobs/{job}/explain/{engine}", self.explain),
            ("/metrics", self.metrics),
            ("/health", self.health),
        ]

    # --- the page ----------------------------------------------------------------------------------

    async def index(self, request: web.Request) -> web.StreamResponse:
        return files.answer(request, self._files["index.html"])

    async def static(self, request: web.Request) -> web.StreamResponse:
        file = self._files.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound
        return files.answer(request, file)

    async def live(self, request: web.Request) -> web.StreamResponse:
        with self._hub.looking_at(None, None) as reader:
            return await live.stream(request, reader)

    async def job_live(self, request: web.Request) -> web.StreamResponse:
        job = await self._named(request, away=True)
        place = Place.parse(request.headers.get("Last-Event-ID", ""))
        with self._hub.looking_at(job, place) as reader:
            return await live.stream(request, reader)

    # --- the same for programs ---------------------------------------------------------------------

    async def jobs(self, _: web.Request) -> web.StreamResponse:
        standings = await self._census.look(await self._census.jobs())
        told = {"bus": shown(self._bus.url), "phases": PHASES, "jobs": [row(one) for one in standings]}
        return as_json(told)

    async def job(self, request: web.Request) -> web.StreamResponse:
        view = (await self._standing(request)).view
        if not isinstance(view, JobView):
            return told(503, str(view))
        return as_json(view)

    async def recoveries(self, request: web.Request) -> web.StreamResponse:
        return as_json(past_of((await self._standing(request)).annals))

    async def events(self, request: web.Request) -> web.StreamResponse:
        job = await self._named(request)
        count = _count(request.query.get("count", "200"))
        types = frozenset(request.query.getall("type", []))
        engine = request.query.get("engine")
        entries = await self._entries(job, WINDOW if types or engine else count)
        found = [
            entry
            for entry in chronicle.of_types(entries, types)
            if engine is None or chronicle.data_of(entry).get("engine") == engine
        ]
        return as_json([as_line(entry) for entry in found[-count:]])

    async def explain(self, request: web.Request) -> web.StreamResponse:
        standing = await self._standing(request)
        name = EngineName(request.match_info["engine"])
        engine = standing.snapshot.engines.get(name) if standing.snapshot else None
        if engine is None:
            raise UsageError(f"job {standing.job} has no engine {name!r}")
        asked = request.query.get("recovery")
        known = self._chains.get((standing.job, asked or ""))
        if known is not None:
            return web.Response(body=known, content_type="application/json")
        entries = await self._entries(standing.job, WINDOW)
        recovery, chain = chronicle.explained(entries, name, engine, RecoveryId(asked) if asked else None)
        explained = chronicle.explained_as_json(name, engine, recovery, chain)
        explained["chain"] = [as_line(entry) for entry in chain]
        if asked and any(entry.type == "RecoveryFinished" for entry in chain):
            self._keep((standing.job, asked), codec.to_json(explained).encode())
        return as_json(explained)

    def _keep(self, key: tuple[JobName, str], chain: bytes) -> None:
        self._chains[key] = chain
        if len(self._chains) > CHAINS_KEPT:
            self._chains.popitem(last=False)

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        standings: list[Standing] = []
        reached = True
        try:
            standings = await self._census.look(await self._census.jobs())
        except BusUnavailable:
            reached = False
        shown = {one.job: metrics.Told(view, one.annals) for one, view in viewed(standings)}
        page = metrics.Page(reached, len(standings) - len(shown), self._hub.readers, self._hub.followed)
        headers = {"Content-Type": exposition.CONTENT_TYPE, "Cache-Control": "no-store"}
        return web.Response(text=metrics.text(shown, page), headers=headers)

    async def health(self, _: web.Request) -> web.StreamResponse:
        try:
            await self._bus.tell_time()
        except BusUnavailable as error:
            return told(503, str(error))
        return as_json({"bus": "serves"})

    # --- inside ------------------------------------------------------------------------------------

    async def _named(self, request: web.Request, *, away: bool = False) -> JobName:
        """The job that is asked for; raises UsageError where there is none. `away`: while the bus is away
        every job may be there."""
        job = job_name(request.match_info["job"])
        try:
            there = await self._census.has(job)
        except BusUnavailable:
            if not away:
                raise
            return job
        if not there:
            raise UsageError(f"bus {shown(self._bus.url)} has no job {job!r}")
        return job

    async def _standing(self, request: web.Request) -> Standing:
        [standing] = await self._census.look([await self._named(request)])
        return standing

    async def _entries(self, job: JobName, count: int) -> list[Entry]:
        """The newest entries; one reading at a time, since each may be some 10 MB."""
        async with self._reading:
            return await Journal(self._bus.job(job), reader=self._bus.readers).tail(count=count)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= EVENTS_MOST:
        raise web.HTTPBadRequest(reason=f"count is a whole number from 1 to {EVENTS_MOST}")
    return int(text)
