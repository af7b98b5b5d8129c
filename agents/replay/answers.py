"""The gateway's answers to `/inference/v1/generate`, in vLLM's shapes, streamed and whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from relight.agents.replay.client import Pieces, ReplayClient
from relight.agents.replay.turn import (
    Choice,
    Piece,
    ReplayError,
    ReplayTimeout,
    RequestRejected,
    Turn,
)
from relight.agents.replay.wire import Ranked, Scored
from relight.events.errors import UsageError

_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "expect", "accept-encoding", "x-session-id"),
        *("content-length", "content-type", "content-encoding"),
    )
)
"""Headers that are this connection's own, or that the client sets anew for each attempt."""

_DONE = b"data: [DONE]\n\n"


class _Body(msgspec.Struct, frozen=True):
    """The fields that the gateway reads; all others are passed on."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None


_READ = ("token_ids", "sampling_params", "stream", "stream_options", "request_id")


async def generate(client: ReplayClient, request: web.Request) -> web.StreamResponse:
    """Answer one request, with replay under it."""
    content = await request.read()
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
        body = msgspec.convert(fields, type=_Body)
    except msgspec.MsgspecError as error:
        return refusal(400, str(error), "BadRequestError")
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
    if body.request_id is not None:
        headers.setdefault("X-Request-Id", body.request_id)
    extra = {name: value for name, value in fields.items() if name not in _READ}
    try:
        async with client.stream(
            body.token_ids,
            body.sampling_params,
            session=request.headers.get("X-Session-ID"),
            headers=headers,
            extra=extra,
        ) as pieces:
            return await (_streamed if body.stream else _whole)(request, body, pieces)
    except UsageError as error:
        return refusal(400, str(error), "BadRequestError")


async def _whole(_: web.Request, body: _Body, pieces: Pieces) -> web.StreamResponse:
    try:
        async for _piece in pieces:
            pass
    except ReplayError as error:
        return _failed(error)
    turn = pieces.turn
    content = {
        "request_id": turn.request_id,
        "model": body.model,
        "choices": [_choice(index, choice) for index, choice in enumerate(turn.choices)],
        "usage": _usage(body, turn),
        "output_mode": "tokens",
    }
    return web.Response(
        body=msgspec.json.encode(content), content_type="application/json", headers=_headers(turn)
    )


async def _streamed(request: web.Request, body: _Body, pieces: Pieces) -> web.StreamResponse:
    try:
        first = await anext(pieces, None)
    except ReplayError as error:
        return _failed(error)
    headers = _headers(pieces.turn)
    if first is not None:
        headers["X-Relight-Attempts"] = str(first.attempt + 1)
    response = web.StreamResponse(headers=headers)
    response.content_type, response.charset = "text/event-stream", "utf-8"
    await response.prepare(request)
    await response.write(await _rest(response, body, pieces, first))
    return response


async def _rest(response: web.StreamResponse, body: _Body, pieces: Pieces, first: Piece | None) -> bytes:
    """Write the pieces; what comes after them, at their end or their failure."""
    request_id = pieces.turn.request_id
    sent: dict[int, int] = {}
    piece = first
    try:
        while piece is not None:
            if piece.start != sent.get(piece.choice, 0):
                pieces.close()
                return _frame(502, _cannot(pieces.turn), "ReplayError") + _DONE
            sent[piece.choice] = piece.start + len(piece.token_ids)
            delta = {
                "index": piece.choice,
                "token_ids": piece.token_ids,
                "logprobs": _logprobs(piece.scored),
                "finish_reason": None,
            }
            await response.write(_event({"request_id": request_id, "choices": [delta]}))
            piece = await anext(pieces, None)
    except ReplayError as error:
        return _frame(_status(error), str(error), type(error).__name__) + _DONE
    turn = pieces.turn
    ends = [_end(index, choice) for index, choice in enumerate(turn.choices)]
    last = _event({"request_id": request_id, "choices": ends})
    if body.stream_options is not None and body.stream_options.get("include_usage"):
        last += _event({"request_id": request_id, "choices": [], "usage": _usage(body, turn)})
    note = f": relight attempts={len(turn.attempts)} kept={turn.kept_tokens}\n\n"
    return last + note.encode() + _DONE


def _cannot(turn: Turn) -> str:
    why = next((each.restarted for each in reversed(turn.attempts) if each.restarted), None)
    return (
        f"the engine failed and this generation cannot be continued exactly"
        f" ({why or 'its tokens were void'}); what was sent cannot be taken back: send the request again"
    )


def _failed(error: ReplayError) -> web.StreamResponse:
    headers = _headers(error.partial)
    if isinstance(error, RequestRejected):
        return web.Response(
            status=error.status, body=error.body, content_type="application/json", headers=headers
        )
    partial = [_choice(index, choice) for index, choice in enumerate(error.partial.choices)]
    return refusal(_status(error), str(error), type(error).__name__, partial=partial, headers=headers)


def _status(error: ReplayError) -> int:
    if isinstance(error, RequestRejected):
        return error.status
    return 504 if isinstance(error, ReplayTimeout) else 502


def refusal(
    status: int,
    message: str,
    kind: str,
    *,
    partial: Sequence[dict[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error in vLLM's shape; `partial` has the choices as far as they came."""
    content: dict[str, Any] = {"error": _error(status, message, kind)}
    if partial is not None:
        content["partial"] = partial
    return web.Response(
        status=status, body=msgspec.json.encode(content), content_type="application/json", headers=headers
    )


def _frame(status: int, message: str, kind: str) -> bytes:
    return _event({"error": _error(status, message, kind)})


def _error(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": status}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _headers(turn: Turn) -> dict[str, str]:
    """As far as it has come: a streamed answer's headers go out with its first piece."""
    return {
        "X-Request-Id": turn.request_id,
        "X-Relight-Attempts": str(len(turn.attempts)),
        "X-Relight-Kept-Tokens": str(turn.kept_tokens),
    }


def _usage(body: _Body, turn: Turn) -> dict[str, int]:
    prompt, made = len(body.token_ids), sum(len(choice.token_ids) for choice in turn.choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _logprobs(scored: Sequence[Scored | Ranked] | None) -> dict[str, Any] | None:
    return None if scored is None else {"content": list(scored)}


def _choice(index: int, choice: Choice) -> dict[str, Any]:
    return {**_end(index, choice), "token_ids": choice.token_ids, "logprobs": _logprobs(choice.scored)}


def _end(index: int, choice: Choice) -> dict[str, Any]:
    """The choice's last chunk, whose tokens have gone out before."""
    return {
        "index": index,
        "token_ids": list[int](),
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "weight_versions": [
            {"version": version, "start": start, "end": end} for version, start, end in choice.versions
        ],
        "routed_experts": choice.routed_experts,
        "sampling_mask": choice.sampling_mask,
    }
