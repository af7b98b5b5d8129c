"""What is said in the background: hints to the orchestrator and aborts to engines. Either may be lost."""

import logging
from typing import NamedTuple

import aiohttp
import anyio
from anyio.abc import TaskGroup

from relight.agents.replay.route import Route
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable
from relight.events.facts import RouteSuspected
from relight.events.ids import Source

log = logging.getLogger(__name__)

SAID_S = 2.0
"""A hint or an abort that takes longer is given up."""

BACKLOG = 1024
"""Hints and aborts under way at once; more are dropped."""


class Asides:
    """Says them in tasks of `tasks`, from `begin` to `end`."""

    def __init__(self, job: JobBus, http: aiohttp.ClientSession, *, source: Source) -> None:
        self._job = job
        self._http = http
        self._source = source
        self._tasks: TaskGroup | None = None
        self._saying = 0

    def begin(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    def end(self) -> None:
        self._tasks = None

    def suspect(self, route: Route, error: str) -> None:
        """Tell the orchestrator that a route looks dead from here."""
        self._later(
            RouteSuspected(engine=route.key.engine, incarnation=route.key.incarnation, error=error[:300])
        )

    def abort(self, route: Route, request_ids: list[str]) -> None:
        """Have the engine forget requests whose connection may not tell it."""
        self._later(_Abort(route.address, request_ids))

    def _later(self, message: "RouteSuspected | _Abort") -> None:
        if self._tasks is None or self._saying >= BACKLOG:
            log.info("dropped: %s", message)
            return
        self._saying += 1
        self._tasks.start_soon(self._say, message)

    async def _say(self, message: "RouteSuspected | _Abort") -> None:
        try:
            with anyio.move_on_after(SAID_S):
                await (self._abort(message) if isinstance(message, _Abort) else self._hint(message))
        finally:
            self._saying -= 1

    async def _hint(self, hint: RouteSuspected) -> None:
        try:
            await self._job.hint(hint, source=self._source)
        except BusUnavailable as error:
            log.info("hint on %s.%d was not told: %s", hint.engine, hint.incarnation, error)

    async def _abort(self, abort: "_Abort") -> None:
        try:
            async with self._http.post(
                f"{abort.address}/abort_requests", json={"request_ids": abort.request_ids}
            ) as response:
                log.debug("abort of %s: status %d", abort.request_ids, response.status)
        except (aiohttp.ClientError, OSError) as error:
            log.info("abort of %s at %s was not told: %s", abort.request_ids, abort.address, error)


class _Abort(NamedTuple):
    address: str
    request_ids: list[str]
    """Never empty: an engine takes that for all of its requests."""
