"""A whole answer out of the events of a stream, in the words of a call that is not streamed. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from relight.agents.replay.texts.asked import Asked

_USAGE = {"prompt_tokens_details": None, "completion_tokens_details": None}
_NO_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_PARTS = ("reasoning", "reasoning_content")


def whole(asked: Asked, payloads: Sequence[bytes]) -> bytes:
    """The answer that these events are; at least one has a choice."""
    chunks: list[dict[str, Any]] = [msgspec.json.decode(payload) for payload in payloads]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    first, last = chunks[0], choices[-1]
    chat = asked.endpoint == "chat"
    merged: dict[str, Any] = {"index": 0}
    merged |= {"message": _message(choices)} if chat else {"text": "".join(each["text"] for each in choices)}
    merged |= {
        "logprobs": _logprobs([each["logprobs"] for each in choices if each.get("logprobs")]),
        "finish_reason": last["finish_reason"],
        "stop_reason": last.get("stop_reason"),
        "token_ids": _ids(choices) if asked.shows_ids else None,
    }
    prompt = _first(chunks if chat else choices, "prompt_token_ids") if asked.shows_ids else None
    around: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": prompt}
    if not chat:
        merged |= around
    return msgspec.json.encode(
        {
            "id": first["id"],
            "object": "chat.completion" if chat else "text_completion",
            "created": first["created"],
            "model": first["model"],
            "choices": [{**merged, "routed_experts": None}],
            "service_tier": None,
            "system_fingerprint": _first(chunks, "system_fingerprint"),
            "usage": _USAGE | _first(chunks, "usage"),
            **(around | {"prompt_text": _first(chunks, "prompt_text")} if chat else {}),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": _first(chunks, "metrics"),
        }
    )


def _message(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    deltas = [choice["delta"] for choice in choices]
    contents = [delta["content"] for delta in deltas if delta.get("content") is not None]
    message: dict[str, Any] = {"role": _first(deltas, "role") or "assistant", "content": "".join(contents)}
    message |= _NO_MESSAGE
    for part in _PARTS:
        if found := [delta[part] for delta in deltas if delta.get(part)]:
            message[part] = "".join(found)
    return message


def _logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Lists of the same name, one after the other."""
    if not parts:
        return None
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


def _ids(choices: Sequence[dict[str, Any]]) -> list[int]:
    return [token for choice in choices for token in choice.get("token_ids") or ()]


def _first(found: Sequence[dict[str, Any]], name: str) -> Any:
    return next((each[name] for each in found if each.get(name) is not None), None)
