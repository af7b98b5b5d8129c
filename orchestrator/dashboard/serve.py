"""The process: a bus that is read, and a page that is served, until it is told to stop."""

import logging
import os
import socket
from typing import NamedTuple

import anyio
from aiohttp import web
from anyio.abc import TaskStatus

from relight.events.bus.client import open_bus
from relight.events.errors import UsageError
from relight.orchestrator.dashboard import files, guard
from relight.orchestrator.dashboard.census import Census
from relight.orchestrator.dashboard.hub import Hub
from relight.orchestrator.dashboard.routes import Site
from relight.orchestrator.service import raise_file_limit

log = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Longest clean end: nothing that is cut off here is lost."""


class Settings(NamedTuple):
    """What can be chosen for one dashboard."""

    host: str = "127.0.0.1"
    port: int = 8266
    allowed: tuple[str, ...] = ()
    """Further names under which browsers may ask for it."""


async def serve(
    *, bus_url: str, settings: Settings, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled. `task_status` is told the port.

    Raises UsageError for a port that cannot be had, BusUnavailable where the bus is not reached at the start.
    """
    raise_file_limit()
    async with open_bus(bus_url, reached=False) as bus, anyio.create_task_group() as tasks:
        await bus.check_kind()  # who asks how things stand is answered on any server that serves
        census = Census(bus)
        hub = Hub(bus, census, tasks)
        page = files.load()
        runner = web.AppRunner(
            _application(Site(bus, census, hub, page), settings),
            handler_cancellation=True,
            shutdown_timeout=LEAVE_S,
            access_log=None,
        )
        await runner.setup()
        try:
            await _listen(runner, settings)
            bound = int(runner.addresses[0][1])
            log.info("dashboard listens on http://%s:%d", _shown(settings.host), bound)
            task_status.started(bound)
            await anyio.sleep_forever()
        finally:
            hub.end()
            with anyio.CancelScope(shield=True):
                await runner.cleanup()


def _application(site: Site, settings: Settings) -> web.Application:
    names = guard.known_names(settings.host, settings.allowed)
    app = web.Application(client_max_size=1024, middlewares=[guard.guarding(names)])
    app.on_response_prepare.append(guard.with_headers)
    for path, route in site.table():
        app.router.add_get(path, route)
    return app


async def _listen(runner: web.AppRunner, settings: Settings) -> None:
    host, port = settings.host, settings.port
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:  # of a name that is none, or of an address that cannot be had
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UsageError(f"dashboard cannot listen on {host}:{port}: {why}") from error


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
