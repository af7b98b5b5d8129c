"""How far an engine's own logprobs of kept tokens lie from those that were recorded. Pure.

An engine that takes over computes the kept tokens' KV anew, in one pass, perhaps in another precision than
they were decoded with: what it then samples follows a slightly other prefix. The recorded logprobs stand,
whatever it says; the largest difference tells how exact the continuation is. It is meaningful where an
engine tells raw logprobs, as vLLM does by default, and only at the version that the tokens were sampled by.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec


class Kept(NamedTuple):
    """A kept token as it was sampled: its place in the prompt that is sent, its id and its logprob."""

    place: int
    token_id: int
    logprob: float


class Unmeasured(Exception):
    """The answer does not tell the logprobs that were asked for."""


class _Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float


class _Answer(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


PARAMS: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
"""Asks for the logprob of each prompt token, and for as little else as an engine can be asked for."""


def largest(answer: bytes, kept: Sequence[Kept]) -> float:
    """The largest difference over `kept`, in nats; raises Unmeasured."""
    try:
        told = msgspec.json.decode(answer, type=_Answer).prompt_logprobs or []
        return max(abs(_at(told, each) - each.logprob) for each in kept)
    except (msgspec.MsgspecError, LookupError) as error:
        raise Unmeasured(f"no logprobs of the kept tokens: {error!r}") from error


def _at(told: list[dict[str, _Logprob] | None], kept: Kept) -> float:
    entry = told[kept.place]
    if entry is None:
        raise LookupError(f"nothing at {kept.place}")
    return entry[str(kept.token_id)].logprob
