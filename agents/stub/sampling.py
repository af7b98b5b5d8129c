"""Reading the body of /inference/v1/generate, and refusing what vLLM refuses with a 400."""

import secrets
from typing import Any, Literal

import msgspec

from relight.agents.stub.settings import Settings
from relight.agents.stub.tokens import GREEDY_BELOW
from relight.agents.stub.wire import Add


class BadRequest(Exception):
    """A refusal: vLLM's message, error type and parameter."""

    def __init__(self, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param


class SamplingParams(msgspec.Struct, frozen=True):
    """The fields of vLLM's SamplingParams that change what the stub does, with vLLM's defaults."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream_interval: int | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """Whether a last chunk tells the usage."""

    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True):
    """The request as posted."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"


def read_body(content: bytes, settings: Settings) -> tuple[Body, Add]:
    """The body and what the core is asked for, numbered 0; raises `BadRequest`."""
    try:
        body = msgspec.json.decode(content, type=Body)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"1 validation error:\n  {error}", "Bad Request", "body") from error
    params = body.sampling_params
    _check(body, params)
    room = settings.max_model_len - len(body.token_ids)
    if room < 1:
        raise BadRequest(
            f"The decoder prompt (length {len(body.token_ids)}) plus the number of requested output tokens "
            f"(at least 1) is longer than the maximum model length of {settings.max_model_len}."
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        if settings.over_length == "refuse":
            raise BadRequest(
                f"This model's maximum context length is {settings.max_model_len} tokens. However, you "
                f"requested {max_tokens} output tokens and your prompt contains {len(body.token_ids)}."
            )
        max_tokens = room
    greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return body, Add(
        number=0,
        token_ids=tuple(body.token_ids),
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=0.0 if greedy else params.temperature,
        seeds=tuple(seed + index for index in range(params.n)),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        prompt_scores=params.prompt_logprobs is not None,
    )


def _check(body: Body, params: SamplingParams) -> None:
    if not body.token_ids:
        raise _invalid("List should have at least 1 item after validation, not 0")
    if min(body.token_ids) < 0:
        raise _invalid("Value error, token_ids must not contain negative values")
    for wrong, message, param in _broken_rules(params):
        if wrong:
            raise BadRequest(message, param=param)


def _invalid(message: str) -> BadRequest:
    return BadRequest(f"1 validation error:\n  body.token_ids: {message}", "Bad Request", "body.token_ids")


def _broken_rules(params: SamplingParams) -> tuple[tuple[bool, str, str | None], ...]:
    """vLLM's rules for sampling parameters in its order: broken, what it says, and the parameter it names."""
    limit, least, heat = params.max_tokens, params.min_tokens, params.temperature
    interval = params.stream_interval
    return (
        (params.n < 1, f"n must be at least 1, got {params.n}.", None),
        (not 0 <= heat <= 2, f"temperature must be in [0, 2], got {heat}.", "temperature"),
        (
            limit is not None and limit < 1,
            f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})",
            "max_tokens",
        ),
        (least < 0, f"min_tokens must be greater than or equal to 0, got {least}.", None),
        (
            limit is not None and least > limit,
            f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.",
            None,
        ),
        (
            interval is not None and interval < 1,
            f"stream_interval must be at least 1, got {interval}.",
            "stream_interval",
        ),
        (
            params.logprobs is not None and params.logprobs < -1,
            f"logprobs must be non-negative or -1, got {params.logprobs}.",
            "logprobs",
        ),
        (
            params.prompt_logprobs is not None and params.prompt_logprobs < -1,
            f"prompt_logprobs must be non-negative or -1, got {params.prompt_logprobs}.",
            "prompt_logprobs",
        ),
        (
            heat < GREEDY_BELOW and params.n > 1,
            f"n must be 1 when using greedy sampling, got {params.n}.",
            None,
        ),
    )


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """vLLM's error response."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
