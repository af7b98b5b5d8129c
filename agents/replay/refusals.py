"""Errors as OpenAI and vLLM write them: as a body before the first byte, as an event after it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from relight.agents.replay.turn import (
    NoRoute,
    PoisonRequestError,
    ReplayError,
    ReplayTimeout,
    RequestRejected,
    Turn,
)

DONE = b"data: [DONE]\n\n"

RETRY_AFTER_S = 5
"""What a caller who found no route is asked to wait: about what one attempt at a recovery takes."""

STATUSES: tuple[tuple[type[ReplayError], int], ...] = (
    (PoisonRequestError, 422),  # a caller's library sends others again by itself; this one kills engines
    (NoRoute, 503),
    (ReplayTimeout, 504),
    (ReplayError, 502),
)


def status_of(error: ReplayError) -> int:
    if isinstance(error, RequestRejected):
        return error.status
    return next(status for kind, status in STATUSES if isinstance(error, kind))


def refusal(
    status: int,
    message: str,
    kind: str,
    *,
    partial: Sequence[dict[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error as the whole answer; `partial` has the choices as far as they came."""
    content: dict[str, Any] = {"error": _error(status, message, kind)}
    if partial is not None:
        content["partial"] = partial
    return web.Response(
        status=status, body=msgspec.json.encode(content), content_type="application/json", headers=headers
    )


def failed(error: ReplayError, *, partial: Sequence[dict[str, Any]] | None = None) -> web.Response:
    """A turn's failure before its first byte; an engine's refusal goes through unchanged."""
    headers = headers_of(error.partial)
    if isinstance(error, RequestRejected):
        return web.Response(
            status=error.status, body=error.body, content_type="application/json", headers=headers
        )
    if isinstance(error, NoRoute):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return refusal(status_of(error), str(error), type(error).__name__, partial=partial, headers=headers)


def frame(status: int, message: str, kind: str) -> bytes:
    """An error as a stream's event."""
    return event({"error": _error(status, message, kind)})


def failed_frame(error: ReplayError) -> bytes:
    """A turn's failure after its first byte."""
    return frame(status_of(error), str(error), type(error).__name__)


def cannot_frame(why: str) -> bytes:
    """What went out cannot be taken back, and what follows would not belong to it."""
    message = (
        f"the engine failed and this generation cannot be continued exactly ({why});"
        " what was sent cannot be taken back: send the request again"
    )
    return frame(502, message, "ReplayError")


def event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def headers_of(turn: Turn) -> dict[str, str]:
    """As far as it has come: a streamed answer's headers go out with its first piece."""
    return {
        "X-Request-Id": turn.request_id,
        "X-Relight-Attempts": str(len(turn.attempts)),
        "X-Relight-Kept-Tokens": str(turn.kept_tokens),
    }


def note_of(turn: Turn) -> bytes:
    """The same at a stream's end, where headers are gone: a comment, which readers of events pass over."""
    return f": relight attempts={len(turn.attempts)} kept={turn.kept_tokens}\n\n".encode()


def _error(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": status}
