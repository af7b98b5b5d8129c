"""The gateway: one address in front of a job's engines, with replay under it, for plain HTTP clients.

It streams from engines always, also for answers that are not streamed. Bytes that went out cannot be taken
back: a turn that would have to be replayed from its prompt after its first byte fails with an error frame.
"""

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
import anyio
from aiohttp import web
from anyio.abc import TaskStatus

from relight.agents.replay.answers import generate, refusal
from relight.agents.replay.client import ReplayClient
from relight.events.errors import RelightError, UsageError

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""How long calls under way may still run once the gateway is told to stop."""

BODY_LIMIT = 256 * 1024 * 1024
"""Bytes of one request: multimodal features are large."""

MODELS_S = 10.0

Route = Callable[[ReplayClient, web.Request], Awaitable[web.StreamResponse]]


async def serve(
    *,
    bus_url: str,
    job: str,
    host: str = "127.0.0.1",
    port: int = 8100,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, then finish the calls under way for up to DRAIN_S.

    `task_status` is told the port. Raises UsageError for a port that cannot be had, BusUnavailable where the
    bus is not reached at the start.
    """
    leave = anyio.Event()
    failed: list[RelightError] = []
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            # Shielded: the client goes on following its routes while calls are finished.
            with anyio.CancelScope(shield=True):
                try:
                    await _serve(ReplayClient(bus_url, job=job), host, port, leave, task_status)
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
    client: ReplayClient, host: str, port: int, leave: anyio.Event, task_status: TaskStatus[int]
) -> None:
    async with client:
        runner = web.AppRunner(
            _application(client), handler_cancellation=True, shutdown_timeout=DRAIN_S, access_log=None
        )
        await runner.setup()
        try:
            await _listen(runner, host, port)
            bound = int(runner.addresses[0][1])
            log.info("gateway listens on %s:%d", host, bound)
            task_status.started(bound)
            await leave.wait()
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:  # of a name that is none, or of an address that cannot be had
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UsageError(f"gateway cannot listen on {host}:{port}: {why}") from error


def _application(client: ReplayClient) -> web.Application:
    app = web.Application(client_max_size=BODY_LIMIT)
    table: tuple[tuple[str, str, Route], ...] = (
        ("POST", "/inference/v1/generate", generate),
        ("GET", "/v1/models", _models),
        ("GET", "/health", _health),
        ("*", "/{rest:.*}", _unknown),
    )
    for method, path, route in table:
        app.router.add_route(method, path, partial(route, client))
    return app


async def _health(client: ReplayClient, _: web.Request) -> web.StreamResponse:
    """200 while calls can go somewhere; a call that comes without a route waits for one all the same."""
    if client.addresses:
        return web.Response()
    return refusal(503, "no engine of this job is routed at the moment", "ServiceUnavailableError")


async def _models(client: ReplayClient, request: web.Request) -> web.StreamResponse:
    """As the first engine that answers says."""
    reasons: list[str] = []
    for address in client.addresses:
        try:
            with anyio.fail_after(MODELS_S):
                async with client.http.get(f"{address}/v1/models") as answer:
                    body = await answer.read()
                    return web.Response(
                        status=answer.status, body=body, content_type=answer.content_type or None
                    )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reasons.append(f"{address}: {error!r}")
    message = f"no engine answers {request.path}: {'; '.join(reasons) or 'none is routed at the moment'}"
    return refusal(503, message, "ServiceUnavailableError")


async def _unknown(_: ReplayClient, request: web.Request) -> web.StreamResponse:
    return refusal(
        501,
        f"the gateway does not serve {request.method} {request.path};"
        " it replays POST /inference/v1/generate and passes GET /v1/models on",
        "NotImplementedError",
    )
