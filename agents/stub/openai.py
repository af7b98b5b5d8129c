"""The routes of text: completions and chats, and what vLLM's scale-out adds: requests and texts as tokens."""

import uuid
from typing import Any, TypeGuard

import msgspec
from aiohttp import web

from relight.agents.stub.engine import Engine
from relight.agents.stub.generate import answered
from relight.agents.stub.log import access
from relight.agents.stub.sampling import (
    BadRequest,
    Body,
    StreamOptions,
    error_body,
    read_body,
)
from relight.agents.stub.spelling import OPEN, decode, encode, name_of, template
from relight.agents.stub.texts import Chat, Completion
from relight.agents.stub.wire import Add

WINDOW = 5
"""Tokens of a prompt that a derendered text begins behind, as in vLLM."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Request(msgspec.Struct, frozen=True):
    """What of both routes' bodies changes what the stub does, with vLLM's defaults."""

    prompt: str | list[Any] | None = None
    messages: list[Message] | None = None
    model: str | None = None
    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool = True
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int = 0


async def completions(request: web.Request, engine: Engine) -> web.StreamResponse:
    """`/v1/completions`, for one prompt."""
    return await _text(request, engine, chat=False)


async def chat(request: web.Request, engine: Engine) -> web.StreamResponse:
    """`/v1/chat/completions`, without tools."""
    return await _text(request, engine, chat=True)


async def render_completion(request: web.Request, engine: Engine) -> web.StreamResponse:
    """`/v1/completions/render`: the request in tokens and resolved parameters."""
    return await _render(request, engine, chat=False)


async def render_chat(request: web.Request, engine: Engine) -> web.StreamResponse:
    """`/v1/chat/completions/render`: the same of a chat."""
    return await _render(request, engine, chat=True)


async def _text(request: web.Request, engine: Engine, *, chat: bool) -> web.StreamResponse:
    try:
        asked, body, add = await _read(request, engine, chat=chat)
    except BadRequest as error:
        return _refused(request, error)
    plain_id = request.headers.get("X-Request-Id") or asked.request_id or uuid.uuid4().hex[:16]
    how: dict[str, Any] = {
        "model": engine.settings.served_model_name,
        "shows_ids": bool(asked.return_token_ids),
        "special": not asked.skip_special_tokens,
        "silent": engine.knobs.no_token_ids,
    }
    words = (
        Chat(body.token_ids, ranked=asked.top_logprobs or 0, **how)
        if chat
        else Completion(body.token_ids, **how)
    )
    return await answered(request, engine, (body, add), plain_id=plain_id, words=words)


async def _render(request: web.Request, engine: Engine, *, chat: bool) -> web.StreamResponse:
    try:
        asked, body, add = await _read(request, engine, chat=chat)
    except BadRequest as error:
        return _refused(request, error)
    params = {**msgspec.to_builtins(body.sampling_params), "max_tokens": add.max_tokens, "output_kind": 1}
    rendered: dict[str, Any] = {
        "request_id": f"rendered-{uuid.uuid4().hex[:16]}",
        "token_ids": body.token_ids,
        "features": None,
        "sampling_params": {name: value for name, value in params.items() if value is not None},
        "model": asked.model,
        "output_mode": "tokens",
        "cache_salt": asked.cache_salt,
        "priority": asked.priority,
    }
    return web.json_response(rendered if chat else [rendered])


async def _read(request: web.Request, engine: Engine, *, chat: bool) -> tuple[Request, Body, Add]:
    """What is asked for, as a request for tokens; raises BadRequest."""
    try:
        asked = msgspec.json.decode(await request.read(), type=Request)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"1 validation error:\n  {error}", "Bad Request", "body") from error
    if asked.model not in (None, engine.settings.served_model_name):
        known = engine.settings.served_model_name
        raise BadRequest(
            f"The model `{asked.model}` does not exist. Valid aliases: {known}.", "NotFoundError"
        )
    limit = asked.max_completion_tokens or asked.max_tokens
    if not chat:
        limit = 16 if asked.max_tokens is None else asked.max_tokens
    scored = (asked.top_logprobs or 0) if chat and asked.logprobs else None if chat else asked.logprobs
    params = {
        "n": asked.n,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_k": asked.top_k or 0,
        "seed": asked.seed,
        "max_tokens": limit,
        "min_tokens": asked.min_tokens,
        "stop_token_ids": asked.stop_token_ids,
        "logprobs": scored,
        "prompt_logprobs": asked.prompt_logprobs,
        "stream_interval": asked.stream_interval,
    }
    options = asked.stream_options if asked.stream else None
    fields = {
        "token_ids": _prompt(asked, chat=chat),
        "sampling_params": params,
        "stream": asked.stream,
        "stream_options": options,
    }
    return asked, *read_body(msgspec.json.encode(fields), engine.settings)


def _prompt(asked: Request, *, chat: bool) -> list[int]:
    if chat:
        if asked.messages is None:
            raise BadRequest(
                "1 validation error:\n  messages: Field required", "Bad Request", "body.messages"
            )
        return template([{"role": each.role, "content": each.content} for each in asked.messages])
    prompt = asked.prompt
    if isinstance(prompt, list) and prompt and _is_prompt(prompt[0]):
        if len(prompt) > 1:
            raise BadRequest("the stub takes one prompt", param="prompt")
        prompt = prompt[0]
    if not prompt:
        raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    return encode(prompt) if isinstance(prompt, str) else [each for each in prompt if isinstance(each, int)]


def _is_prompt(value: object) -> TypeGuard[str | list[Any]]:
    return isinstance(value, str | list)


def _refused(request: web.Request, error: BadRequest) -> web.Response:
    status = 404 if error.kind == "NotFoundError" else 400
    access(request, status)
    return web.json_response(error_body(str(error), error.kind, status, error.param), status=status)


# --- tokens as text ----------------------------------------------------------------------------------


class _Scored(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _Content(msgspec.Struct, frozen=True):
    content: list[_Scored]


class _Choice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int]
    logprobs: _Content | None = None


class _Chunk(msgspec.Struct, frozen=True):
    request_id: str
    choices: list[_Choice]


class _State(msgspec.Struct, frozen=True):
    """Where a text stands. Token strings are the tokens' numbers."""

    prev_tokens: list[str] = []
    read_offset: int = 0
    logprob_context_token_ids: list[int] = []


class _Spelling(msgspec.Struct, frozen=True):
    skip_special_tokens: bool = True


class _Derender(msgspec.Struct, frozen=True):
    generate_chunk: _Chunk
    stream_state: _State | None = None
    prompt_token_ids: list[int] | None = None
    completion_request: _Spelling = _Spelling()


async def derender(request: web.Request, engine: Engine) -> web.StreamResponse:
    """`/v1/completions/derender`, streamed: the text of one chunk of tokens, and where it stands then."""
    try:
        asked = msgspec.json.decode(await request.read(), type=_Derender)
    except msgspec.MsgspecError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    prompt = asked.prompt_token_ids or []
    state = asked.stream_state or _State([str(each) for each in prompt[-WINDOW:]], len(prompt[-WINDOW:]))
    (choice,) = asked.generate_chunk.choices
    ids, read = [int(each) for each in state.prev_tokens], state.read_offset
    special = not asked.completion_request.skip_special_tokens
    text = ""
    for token_id in choice.token_ids:
        ids.append(token_id)
        before, now = decode(ids[:read], special=special), decode(ids, special=special)
        if len(now) > len(before) and not now.endswith(OPEN):
            text += now[len(before) :]
            ids, read = ids[read:], len(ids) - read
    context = list(state.logprob_context_token_ids)
    names: list[str] = []
    for scored in choice.logprobs.content if choice.logprobs else ():
        names.append(name_of(scored.token_id, context))
        context.append(scored.token_id)
    told = {"tokens": names, "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    said = {"index": choice.index, "text": text, "logprobs": told if choice.logprobs else None}
    after = _State([str(each) for each in ids], read, context[-WINDOW:])
    return web.json_response(
        {
            "chunk": {"id": asked.generate_chunk.request_id, "choices": [said]},
            "stream_state": msgspec.to_builtins(after),
        }
    )
