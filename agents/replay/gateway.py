"""The gateway: one address in front of a job's engines, with replay under it, for plain HTTP clients.

It streams from engines wherever an answer can go on after a death, also for answers that are not streamed.
Bytes that went out cannot be taken back: a turn that would have to be replayed from its prompt after its
first byte fails with an error event. A caller that reads slowly slows its engine's stream down; one that goes
away ends it.
"""

import logging
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import anyio
from aiohttp import web
from anyio.abc import TaskStatus

from relight.agents.replay import passing
from relight.agents.replay.answers import generate
from relight.agents.replay.client import ReplayClient
from relight.agents.replay.refusals import refusal
from relight.agents.replay.texts.answer import answer
from relight.events.errors import RelightError, UsageError

log = logging.getLogger(__name__)

BODY_LIMIT = 256 * 1024 * 1024
"""Bytes of one request: multimodal features are large."""

DESCRIPTORS = 65_536
"""Each call takes two; what the hard limit allows of that is taken."""

BACKLOG = 4096
"""Connections that wait to be accepted: rollouts begin all at once."""

Route = Callable[[ReplayClient, web.Request], Awaitable[web.StreamResponse]]


class Settings(NamedTuple):
    """What can be chosen for one gateway."""

    host: str = "127.0.0.1"
    port: int = 8100
    drain_s: float = 30.0
    """How long calls under way may still run once it is told to stop."""
    recovery_timeout_s: float = 300.0
    """How long a call waits for a route, and for tokens to come again after a death."""
    max_engine_failures: int = 3
    """Failures of engines that one call may meet."""


async def serve(
    *,
    bus_url: str,
    job: str,
    settings: Settings,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, then finish the calls under way for up to `drain_s`.

    `task_status` is told the port. Raises UsageError for a port that cannot be had, BusUnavailable where the
    bus is not reached at the start.
    """
    leave = anyio.Event()
    failed: list[RelightError] = []
    client = ReplayClient(
        bus_url,
        job=job,
        recovery_timeout_s=settings.recovery_timeout_s,
        max_engine_failures=settings.max_engine_failures,
    )
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            # Shielded: the client goes on following its routes while calls are finished.
            with anyio.CancelScope(shield=True):
                try:
                    await _serve(client, settings, leave, task_status)
                except RelightError as error:
                    failed.append(error)
            tasks.cancel_scope.cancel()

        tasks.start_soon(run)
        try:
            await anyio.sleep_forever()
        finally:
            leave.set()
    if failed:
        raise failed[0]


async def _serve(
    client: ReplayClient, settings: Settings, leave: anyio.Event, task_status: TaskStatus[int]
) -> None:
    _raise_descriptors()
    async with client:
        runner = web.AppRunner(
            _application(client),
            handler_cancellation=True,
            shutdown_timeout=settings.drain_s,
            access_log=None,
        )
        await runner.setup()
        try:
            await _listen(runner, settings)
            bound = int(runner.addresses[0][1])
            log.info("gateway listens on %s:%d", settings.host, bound)
            task_status.started(bound)
            await leave.wait()
            log.info("gateway stops: calls under way have %g s", settings.drain_s)
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, settings: Settings) -> None:
    host, port = settings.host, settings.port
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except OSError as error:  # of a name that is none, or of an address that cannot be had
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UsageError(f"gateway cannot listen on {host}:{port}: {why}") from error


def _raise_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _application(client: ReplayClient) -> web.Application:
    app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_refused])
    table: tuple[tuple[str, str, Route], ...] = (
        ("POST", "/inference/v1/generate", generate),
        ("POST", "/v1/completions", partial(answer, "completions")),
        ("POST", "/v1/chat/completions", partial(answer, "chat")),
        ("GET", "/v1/models", passing.models),
        ("GET", "/health", passing.health),
        ("GET", "/metrics", passing.metrics),
        ("*", "/{rest:.*}", passing.unknown),
    )
    for method, path, route in table:
        app.router.add_route(method, path, partial(route, client))
    return app


@web.middleware
async def _refused(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What is refused before any route reads it, in the words of the routes: a body that is too large."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return refusal(error.status, error.text or error.reason, "BadRequestError")
