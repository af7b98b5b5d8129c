"""A delivery as a stream of server-sent events: its headers with the first byte, its failures as an event."""

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from relight.agents.replay.delivery import Delivery
from relight.agents.replay.generation import Generation
from relight.agents.replay.refusals import DONE, cannot_frame, failed, failed_frame, headers_of, note_of
from relight.agents.replay.turn import ReplayError, Turn

Partial = Callable[[Turn], Sequence[dict[str, Any]]]


async def streamed(
    request: web.Request, ledger: Delivery, generation: Generation, *, partial: Partial | None = None
) -> web.StreamResponse:
    """Give the whole turn out. `partial`: what a failure before the first byte tells of it.

    A reader that is slow holds the turn up: the next step is taken when its bytes are gone.
    """
    response: web.StreamResponse | None = None
    ready: list[bytes] = []
    try:
        while not generation.done:
            attempts = generation.attempt
            await generation.step()
            ready = ledger.take()
            if generation.done:
                break
            if ready:
                if response is None:
                    response = await _begun(request, generation)
                await response.write(_events(ready))
            ended = generation.attempt > attempts
            if response is not None and ended and (why := ledger.why_replayed("")) is not None:
                generation.close()
                await response.write_eof(cannot_frame(why) + note_of(generation.turn()) + DONE)
                return response
    except ReplayError as error:
        if response is None:
            return failed(error, partial=None if partial is None else partial(error.partial))
        await response.write_eof(failed_frame(error) + note_of(error.partial) + DONE)
        return response
    if response is None:
        response = await _begun(request, generation)
    await response.write_eof(_events([*ready, *ledger.last()]) + note_of(generation.turn()) + DONE)
    return response


class _Stream(web.StreamResponse):
    """Sends its headers with its first event, not in a packet of their own."""

    _send_headers_immediately = False


async def _begun(request: web.Request, generation: Generation) -> web.StreamResponse:
    headers = headers_of(generation.turn())
    headers["X-Relight-Attempts"] = str(generation.attempt + (not generation.done))
    response = _Stream(headers=headers)
    response.content_type, response.charset = "text/event-stream", "utf-8"
    await response.prepare(request)
    return response


def _events(payloads: list[bytes]) -> bytes:
    return b"data: " + b"\n\ndata: ".join(payloads) + b"\n\n" if payloads else b""
