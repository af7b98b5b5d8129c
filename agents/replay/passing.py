"""What goes through the gateway as it is, and what it says of itself."""

from collections.abc import Sequence

import aiohttp
import anyio
from aiohttp import web

from relight.agents.replay.client import ReplayClient
from relight.agents.replay.refusals import refusal

HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "expect", "accept-encoding", "x-session-id"),
        *("content-length", "content-type", "content-encoding"),
    )
)
"""Headers that are this connection's own, or that the client sets anew for each attempt."""

MODELS_S = 10.0


def passed_on(request: web.Request) -> dict[str, str]:
    """The caller's headers for each attempt."""
    return {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}


async def health(client: ReplayClient, _: web.Request) -> web.StreamResponse:
    """200 while calls can go somewhere; a call that comes without a route waits for one all the same."""
    if client.addresses:
        return web.Response()
    return refusal(503, "no engine of this job is routed at the moment", "ServiceUnavailableError")


async def metrics(client: ReplayClient, _: web.Request) -> web.StreamResponse:
    """The gateway's own: what replays cost. An engine's are the engine's to tell."""
    return web.Response(text=client.metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def models(client: ReplayClient, request: web.Request) -> web.StreamResponse:
    """As the first engine that answers says."""
    return await models_of(client.addresses, request, http=client.http)


async def models_of(
    addresses: Sequence[str], request: web.Request, *, http: aiohttp.ClientSession
) -> web.Response:
    """As the first of `addresses` that answers says; 503 where none does."""
    reasons: list[str] = []
    for address in addresses:
        try:
            with anyio.fail_after(MODELS_S):
                async with http.get(f"{address}/v1/models", headers=passed_on(request)) as answer:
                    body = await answer.read()
                    return web.Response(
                        status=answer.status, body=body, content_type=answer.content_type or None
                    )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reasons.append(f"{address}: {error!r}")
    message = f"no engine answers {request.path}: {'; '.join(reasons) or 'none is routed at the moment'}"
    return refusal(503, message, "ServiceUnavailableError")


async def unknown(_: ReplayClient, request: web.Request) -> web.StreamResponse:
    return refusal(
        501,
        f"the gateway does not serve {request.method} {request.path}; it replays POST /inference/v1/generate,"
        " /v1/completions and /v1/chat/completions, and passes GET /v1/models on",
        "NotImplementedError",
    )
