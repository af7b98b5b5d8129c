"""The gateway's answers to `/inference/v1/generate`, in vLLM's shapes, streamed and whole."""

from typing import Any

import msgspec
from aiohttp import web

from relight.agents.replay.carried import Carriage, CarriedTokens, end, logprobs, usage
from relight.agents.replay.client import ReplayClient
from relight.agents.replay.passing import passed_on
from relight.agents.replay.refusals import failed, headers_of, refusal
from relight.agents.replay.streaming import streamed
from relight.agents.replay.turn import ReplayError, Turn
from relight.events.errors import UsageError


class _Body(msgspec.Struct, frozen=True):
    """The fields that the gateway reads; all others are passed on."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None

    @property
    def counts(self) -> bool:
        """The usage is to be told at a stream's end."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))


_READ = ("token_ids", "sampling_params", "stream", "stream_options", "request_id")


async def generate(client: ReplayClient, request: web.Request) -> web.StreamResponse:
    """Answer one request, with replay under it."""
    content = await request.read()
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
        body = msgspec.convert(fields, type=_Body)
    except msgspec.MsgspecError as error:
        return refusal(400, str(error), "BadRequestError")
    headers = passed_on(request)
    if body.request_id is not None:
        headers.setdefault("X-Request-Id", body.request_id)
    extra = {name: value for name, value in fields.items() if name not in _READ}
    call: dict[str, Any] = {
        "session": request.headers.get("X-Session-ID"),
        "headers": headers,
        "extra": extra,
    }
    try:
        if not body.stream:
            return _whole(body, await client.generate(body.token_ids, body.sampling_params, **call))
        ledger = Carriage(body.token_ids, body.sampling_params, usage=body.counts)
        with client.speaking(CarriedTokens(ranked=ledger.ranked), ledger, **call) as generation:
            return await streamed(request, ledger, generation, partial=_partial)
    except ReplayError as error:
        return failed(error, partial=_partial(error.partial))
    except UsageError as error:
        return refusal(400, str(error), "BadRequestError")


def _whole(body: _Body, turn: Turn) -> web.Response:
    content = {
        "request_id": turn.request_id,
        "model": body.model,
        "choices": _partial(turn),
        "usage": usage(len(body.token_ids), turn.choices),
        "output_mode": "tokens",
    }
    return web.Response(
        body=msgspec.json.encode(content), content_type="application/json", headers=headers_of(turn)
    )


def _partial(turn: Turn) -> list[dict[str, Any]]:
    """The choices as far as they came, which in a complete turn is whole."""
    return [
        {**end(index, choice), "token_ids": choice.token_ids, "logprobs": logprobs(choice.scored)}
        for index, choice in enumerate(turn.choices)
    ]
