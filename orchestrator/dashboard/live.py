"""Server-sent events to one browser, for as long as it listens."""

import anyio
from aiohttp import web

from relight.orchestrator.dashboard import frames
from relight.orchestrator.dashboard.channel import Subscription

PING_S = 10.0
"""A browser that is gone is noticed by then."""

WRITE_S = 20.0
"""A browser that takes nothing for this long is cut off."""

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


async def stream(request: web.Request, reader: Subscription) -> web.StreamResponse:
    """Tell what comes until the reader's end, or the browser's."""
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    if not await _sent(request, response, frames.RETRY):
        return response
    while True:
        taken = frames.PING
        with anyio.move_on_after(PING_S):
            taken = await reader.take()
        if not await _sent(request, response, taken) or reader.over:
            return response


async def _sent(request: web.Request, response: web.StreamResponse, data: bytes) -> bool:
    """Whether the browser took it, all of it or so much that the rest waits in the socket."""
    try:
        with anyio.fail_after(WRITE_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return False
    except ConnectionError:
        return False
    return True
