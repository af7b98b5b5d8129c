"""The JSON that /inference/v1/generate answers, field for field as vLLM 0.32 does with output_mode tokens."""

import time
from typing import Any, Protocol

import msgspec

from relight.agents.stub.generation import Generation, Part
from relight.agents.stub.knobs import Knobs
from relight.agents.stub.sampling import Body
from relight.agents.stub.tokens import Token

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


def choice(part: Part, index: int, upto: int, *, body: Body, knobs: Knobs) -> dict[str, Any]:
    """The choice with tokens `part.sent` to `upto`; it carries the finish when it reaches the end."""
    tokens = part.tokens[part.sent : upto]
    drop = knobs.drop_token
    if drop is not None and part.sent <= drop < upto:
        tokens = tokens[: drop - part.sent] + tokens[drop - part.sent + 1 :]
    last = part.finish is not None and upto == len(part.tokens)
    return {
        "index": index,
        "finish_reason": part.finish if last else None,
        "stop_reason": part.stop if last else None,
        "token_ids": [token.token_id for token in tokens],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": part.spans() if last else None,
        "logprobs": _logprobs(tokens, body.sampling_params.logprobs, knobs),
    }


def chunk(
    generation: Generation, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
) -> bytes:
    """One event of a stream."""
    return event(
        {"request_id": generation.request_id, "choices": choices, "usage": usage, "output_mode": "tokens"}
    )


def usage(generation: Generation, prompt: int) -> dict[str, Any]:
    """How many tokens came in and went out."""
    made = sum(len(part.tokens) for part in generation.parts)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + made,
        "completion_tokens": made,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def whole(generation: Generation, choices: list[dict[str, Any]], body: Body, model: str) -> dict[str, Any]:
    """The answer of a request that is not streamed."""
    return {
        "request_id": generation.request_id,
        "model": model,
        "created": int(time.time()),
        "usage": usage(generation, len(body.token_ids)),
        "prompt_logprobs": _prompt_logprobs(generation)
        if body.sampling_params.prompt_logprobs is not None
        else None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": choices,
    }


class Words(Protocol):
    """How one answer is written."""

    def name(self, plain_id: str) -> str:
        """What the engine calls the request."""
        ...

    def chunk(
        self, generation: Generation, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> bytes:
        """The events of a stream for some choices as `choice` makes them, or for the usage."""
        ...

    def whole(
        self, generation: Generation, choices: list[dict[str, Any]], body: Body, model: str
    ) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        ...


class _Tokens:
    """The words of `/inference/v1/generate`."""

    def name(self, plain_id: str) -> str:
        return f"generate-tokens-{plain_id}"

    def chunk(
        self, generation: Generation, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> bytes:
        return chunk(generation, choices, usage)

    def whole(
        self, generation: Generation, choices: list[dict[str, Any]], body: Body, model: str
    ) -> dict[str, Any]:
        return whole(generation, choices, body, model)


TOKENS = _Tokens()


def _logprobs(tokens: list[Token], wanted: int | None, knobs: Knobs) -> dict[str, Any] | None:
    if wanted is None:
        return None
    content: list[dict[str, Any]] = []
    for token in tokens[: len(tokens) - knobs.short_logprobs]:
        entry = {"token_id": token.token_id, "logprob": token.logprob, "rank": token.rank}
        content.append({**entry, "top_logprobs": [entry]})
    return {"content": content}


def _prompt_logprobs(generation: Generation) -> list[dict[str, Any] | None]:
    return [
        None
        if score is None
        else {str(score.token_id): {"logprob": score.logprob, "rank": score.rank, "decoded_token": None}}
        for score in generation.scores
    ]
