"""What a call asks for, as far as the gateway reckons with it. Pure.

Everything else in the body is the engine's business and goes through as it came; so does a body that makes no
sense here: the engine refuses it in its own words.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

import msgspec

from relight.agents.replay.params import rules
from relight.events.errors import UsageError

Endpoint = Literal["completions", "chat"]

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none; OpenAI's default, and vLLM's."""

PARAMS = (
    *("n", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "bad_words"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "structured_outputs"),
    *("response_format", "thinking_token_budget", "repetition_detection"),
)
"""Fields that bear on a continuation; those that `guided_` begins do too."""

Fields = Mapping[str, Any]


def _given(name: str) -> Callable[[Fields], bool]:
    return lambda fields: bool(fields.get(name))


def _set(name: str) -> Callable[[Fields], bool]:
    return lambda fields: fields.get(name) is not None


def _several_prompts(fields: Fields) -> bool:
    prompts = _list(fields.get("prompt"))
    return len(prompts) > 1 and not isinstance(prompts[0], int)


def _not_only_text(fields: Fields) -> bool:
    contents = [_object(message).get("content") for message in _list(fields.get("messages"))]
    return any(
        _object(part).get("type") not in ("text", None) for content in contents for part in _list(content)
    )


def _list(value: object) -> list[Any]:
    return value if _is_list(value) else []


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _object(value: object) -> dict[str, Any]:
    return value if _is_object(value) else {}


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


UNCONTINUED: tuple[tuple[Callable[[Fields], bool], str], ...] = (
    (_several_prompts, "several prompts"),
    (_set("prompt_embeds"), "a prompt of embeddings"),
    (_not_only_text, "images, audio or video in the prompt"),
    (_given("tools"), "the state of a tool call's parser"),
    (_given("functions"), "the state of a tool call's parser"),
    (_given("echo"), "echo"),
    (_set("suffix"), "suffix"),
    (_given("use_beam_search"), "beam search"),
    (lambda fields: (fields.get("best_of") or 1) > 1, "best_of"),
    (_set("prompt_logprobs"), "prompt_logprobs"),
    (_given("logprob_token_ids"), "logprob_token_ids"),
    (_given("return_tokens_as_token_ids"), "return_tokens_as_token_ids"),
    (_given("kv_transfer_params"), "kv_transfer_params"),
    (_given("ec_transfer_params"), "ec_transfer_params"),
    (_given("routed_experts_prompt_start"), "routing records"),
)
"""What forbids to go on after a death, beside what forbids it for tokens, and how that is called."""


class Asked(NamedTuple):
    """One call, read."""

    endpoint: Endpoint
    content: bytes
    """The body as it came."""
    fields: dict[str, Any]
    streamed: bool
    why_replayed: str | None
    """Why an answer to it can only be given anew after a death; none where it can go on."""
    params: dict[str, Any]
    """What the ledger reckons with."""
    choices: int
    usage: bool
    """The caller wants a last chunk with the usage."""
    continuous: bool
    """And the usage so far with each chunk."""
    shows_ids: bool
    """The caller wants token ids too."""
    scored: bool
    ranked: int
    """Candidates a token that the caller wants to see, in chat answers."""

    @property
    def session(self) -> str | None:
        """vLLM's field for calls that belong together."""
        session = self.fields.get("session_id")
        return session if isinstance(session, str) else None


def read(endpoint: Endpoint, content: bytes) -> Asked:
    """Read one call. Never fails: what makes no sense here is passed on as it is."""
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        return _asked(endpoint, content, {}, why="a body that is no JSON object")
    try:
        why = next((name for forbids, name in UNCONTINUED if forbids(fields)), None)
        params = _params(endpoint, fields)
        return _asked(endpoint, content, fields, params, why=why or rules(params, tokenizer=False).replayed)
    except (UsageError, TypeError, AttributeError) as error:
        return _asked(endpoint, content, fields, why=f"a body that the engine has to judge: {error}")


def _asked(
    endpoint: Endpoint,
    content: bytes,
    fields: dict[str, Any],
    params: dict[str, Any] | None = None,
    *,
    why: str | None,
) -> Asked:
    options = _object(fields.get("stream_options"))
    scored = fields.get("logprobs") if endpoint == "chat" else fields.get("logprobs") is not None
    top = fields.get("top_logprobs")
    prompts = len(fields["prompt"]) if _several_prompts(fields) else 1
    n = fields.get("n")
    return Asked(
        endpoint=endpoint,
        content=content,
        fields=fields,
        streamed=fields.get("stream") is True,
        why_replayed=why,
        params=params or {},
        choices=prompts * (n if isinstance(n, int) and n > 0 else 1),
        usage=bool(options.get("include_usage")),
        continuous=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        shows_ids=bool(fields.get("return_token_ids")),
        scored=bool(scored),
        ranked=top if isinstance(top, int) else 0,
    )


def _params(endpoint: Endpoint, fields: Fields) -> dict[str, Any]:
    params = {
        name: value
        for name, value in fields.items()
        if value is not None and (name in PARAMS or name.startswith("guided_"))
    }
    if _object(params.get("response_format")).get("type") == "text":
        del params["response_format"]
    if not params.get("stop"):
        params.pop("stop", None)
    if endpoint == "completions":
        params.setdefault("max_tokens", COMPLETION_TOKENS)
    elif (limit := fields.get("max_completion_tokens")) is not None:
        params["max_tokens"] = limit
    return params
