"""The JSON of the two endpoints, as vLLM writes it: read once a chunk, written only behind a seam. Pure.

A first attempt's bytes go on as they came. What the gateway has added to the request (token ids) is put back
to `null` in the bytes: a quote inside a JSON string is escaped, so what is looked for are keys alone.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from relight.agents.replay.texts.asked import Asked
from relight.agents.replay.wire import Failure, ScoredChunk, ScoredDelta, VersionSpan

Part = Literal["tokens", "preamble", "usage", "end"]

_IDS = b'token_ids":['


def without_ids(payload: bytes) -> bytes:
    """`payload` as the engine writes it for a caller that wants no token ids."""
    at = payload.find(_IDS)
    while at >= 0:
        at += len(_IDS) - 1
        payload = payload[:at] + b"null" + payload[payload.index(b"]", at) + 1 :]
        at = payload.find(_IDS, at)
    return payload


class Entry(msgspec.Struct, frozen=True, omit_defaults=False):
    """A token with its logprob, in the words of chat answers."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None
    top_logprobs: list["Entry"] | None = None


class Said(ScoredDelta, frozen=True, kw_only=True):
    """What one event brings. `payload`: its bytes, where they may go on as they are."""

    part: Part = "tokens"
    text: str = ""
    payload: bytes = b""
    prompt_token_ids: list[int] | None = None
    parsed: bool = False
    """A parser has made something else than text of the tokens."""
    counted: int | None = None
    """Logprobs that came."""
    spoken: int = 0
    """Where the next token's text begins, for `text_offset`."""
    entries: list[Entry] | None = None
    """The logprobs behind a seam."""


class Head(NamedTuple):
    """What each chunk of one answer says again."""

    id: str
    created: int
    model: str


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


# --- reading an engine's own answer ------------------------------------------------------------------


class _Logprobs(msgspec.Struct, frozen=True):
    tokens: list[str] = []
    text_offset: list[int] = []
    content: list[Any] | None = None


class _Delta(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str = ""
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    error: Failure | str | None = None


_own = msgspec.json.Decoder(_Chunk)


def head_of(payload: bytes) -> Head:
    """The head of a chunk, which only the first one of an answer is asked for."""
    chunk = _own.decode(payload)
    return Head(chunk.id, chunk.created, chunk.model)


def unfinished(payload: bytes) -> bytes:
    """A chunk without its finish, which was the attempt's and not the answer's."""
    fields = msgspec.json.decode(payload)
    for choice in fields["choices"]:
        choice["finish_reason"] = choice["stop_reason"] = None
    return msgspec.json.encode(fields)


def read(payload: bytes) -> ScoredChunk:
    """One event of an engine's own answer; raises MsgspecError."""
    chunk = _own.decode(payload)
    if not chunk.choices:
        return ScoredChunk([Said(index=0, part="usage", payload=payload)], _name(chunk.id), chunk.error)
    told: list[ScoredDelta] = []
    for choice in chunk.choices:
        told.append(_said(choice, b"" if told else payload, chunk.prompt_token_ids))
    return ScoredChunk(told, _name(chunk.id), chunk.error)


def _name(answer_id: str) -> str:
    """What the engine calls the request of that answer: a completion has one for each prompt."""
    return f"{answer_id}-0" if answer_id.startswith("cmpl-") else answer_id


def _said(choice: _Choice, payload: bytes, prompt: list[int] | None) -> Said:
    delta, logprobs = choice.delta, choice.logprobs
    text = choice.text if delta is None else delta.content or ""
    begins = delta is not None and delta.role is not None
    preamble = begins and not (text or choice.token_ids or choice.finish_reason)
    return Said(
        index=choice.index,
        part="preamble" if preamble else "tokens",
        text=text,
        payload=payload,
        token_ids=choice.token_ids,
        prompt_token_ids=choice.prompt_token_ids or prompt,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        parsed=delta is not None and _parsed(delta),
        counted=None
        if logprobs is None
        else len(logprobs.tokens if delta is None else logprobs.content or ()),
        spoken=_spoken(logprobs),
    )


def _parsed(delta: _Delta) -> bool:
    return bool(delta.reasoning or delta.reasoning_content or delta.tool_calls)


def _spoken(logprobs: _Logprobs | None) -> int:
    if logprobs is None or not logprobs.text_offset:
        return 0
    return logprobs.text_offset[-1] + len(logprobs.tokens[-1])


# --- reading a continuation --------------------------------------------------------------------------


class _Content(msgspec.Struct, frozen=True):
    content: list[Entry] | None = None


class _Continued(msgspec.Struct, frozen=True):
    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Content | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] | None = None


class _ContinuedChunk(msgspec.Struct, frozen=True):
    choices: list[_Continued] = []
    request_id: str = ""
    error: Failure | str | None = None


_continued = msgspec.json.Decoder(_ContinuedChunk)


def read_continued(payload: bytes) -> ScoredChunk:
    """One event of `/inference/v1/generate` in text mode; raises MsgspecError."""
    chunk = _continued.decode(payload)
    told: list[ScoredDelta] = [
        Said(
            index=choice.index,
            text=choice.text,
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            weight_versions=choice.weight_versions,
            counted=None if choice.logprobs is None else len(choice.logprobs.content or ()),
            entries=None if choice.logprobs is None else choice.logprobs.content,
        )
        for choice in chunk.choices
    ]
    return ScoredChunk(told, chunk.request_id, chunk.error)


# --- writing behind a seam ---------------------------------------------------------------------------


def logprobs_of(asked: Asked, entries: Sequence[Entry], *, offset: int) -> dict[str, Any]:
    """`entries` in the endpoint's own shape; `offset` is where their text begins."""
    if asked.endpoint == "chat":
        return {"content": [_chat_entry(entry, asked.ranked) for entry in entries]}
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "text_offset": offsets,
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": [entry.token for entry in entries],
        "top_logprobs": [
            {each.token: each.logprob for each in entry.top_logprobs or ()} for entry in entries
        ],
    }


def _chat_entry(entry: Entry, ranked: int) -> dict[str, Any]:
    tops = entry.top_logprobs or []
    shown = tops if ranked < 0 else tops[:ranked]
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": entry.bytes,
        "top_logprobs": [
            {"token": each.token, "logprob": each.logprob, "bytes": each.bytes} for each in shown
        ],
    }


def chunk(asked: Asked, head: Head, said: Said, *, offset: int, usage: Usage | None) -> bytes:
    """One chunk in the words of a first attempt's."""
    ids = said.token_ids if asked.shows_ids else None
    logprobs = None if said.entries is None else logprobs_of(asked, said.entries, offset=offset)
    choice: dict[str, Any] = {"index": said.index}
    choice |= {"text": said.text} if asked.endpoint == "completions" else {"delta": {"content": said.text}}
    choice |= {"logprobs": logprobs, "finish_reason": said.finish_reason}
    if asked.endpoint == "completions":
        choice |= {"stop_reason": said.stop_reason, "prompt_token_ids": None}
    elif said.finish_reason is not None:
        choice["stop_reason"] = said.stop_reason
    return _event(asked, head, [{**choice, "token_ids": ids}], usage)


def usage_chunk(asked: Asked, head: Head, usage: Usage) -> bytes:
    """The last chunk of a stream whose usage no engine can tell."""
    return _event(asked, head, [], usage)


def _event(asked: Asked, head: Head, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
    kind = "text_completion" if asked.endpoint == "completions" else "chat.completion.chunk"
    content: dict[str, Any] = {
        "id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices
    }  # fmt: skip
    if usage is not None:
        content["usage"] = usage
    return msgspec.json.encode(content)
