"""Answers in tokens whose bytes go through: a first attempt's events are passed on as the engine wrote them.

Behind a seam they are written anew, under the id that the answer began with.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from relight.agents.replay import wire
from relight.agents.replay.delivery import Delivery
from relight.agents.replay.ledger import Ask, News
from relight.agents.replay.params import Params
from relight.agents.replay.request import Tokens
from relight.agents.replay.stream import Flight
from relight.agents.replay.turn import Choice
from relight.agents.replay.wire import Chunk, Delta, Ranked, RankedDelta, Scored, ScoredDelta


class CarriedScored(ScoredDelta, frozen=True, kw_only=True):
    payload: bytes = b""


class CarriedRanked(RankedDelta, frozen=True, kw_only=True):
    payload: bytes = b""


class _ScoredChunk(msgspec.Struct, frozen=True, gc=False):
    choices: list[CarriedScored] = []
    request_id: str = ""
    error: wire.Failure | str | None = None


class _RankedChunk(msgspec.Struct, frozen=True, gc=False):
    choices: list[CarriedRanked] = []
    request_id: str = ""
    error: wire.Failure | str | None = None


_CARRIED = (CarriedScored, CarriedRanked)

_scored = msgspec.json.Decoder(_ScoredChunk)
_ranked = msgspec.json.Decoder(_RankedChunk)


class CarriedFlight(Flight):
    """Reads each event's tokens and keeps its bytes, where they are of one choice."""

    def __init__(self, *, ranked: bool, idle_s: float | None) -> None:
        super().__init__(ranked=ranked, idle_s=idle_s)
        self._ranks = ranked

    def _decode(self, payload: bytes) -> Chunk:
        chunk: Any = _ranked.decode(payload) if self._ranks else _scored.decode(payload)
        if len(chunk.choices) == 1:
            msgspec.structs.force_setattr(chunk.choices[0], "payload", payload)  # nobody has seen it yet
        told: Chunk = chunk
        return told


class CarriedTokens(Tokens):
    """The speech of tokens, read so."""

    def flight(self, *, idle_s: float | None) -> Flight:
        return CarriedFlight(ranked=self._ranked, idle_s=idle_s)


class Carriage(Delivery):
    """The ledger of one such answer. `usage`: the caller wants it at the end."""

    def __init__(self, prompt: Sequence[int], params: Params, *, usage: bool) -> None:
        super().__init__(prompt, params)
        self._counts = usage
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._request_id: str | None = None
        self._first = True
        """The attempt under way is the answer's first: what it says is said of the whole answer."""

    def ask(self, *, attempt: int, version: str) -> Ask:
        ask = super().ask(attempt=attempt, version=version)
        self._first = ask.kept == 0
        return ask

    def feed(self, delta: Delta) -> News | None:
        news = super().feed(delta)
        if news is None:
            return None
        payload = delta.payload if isinstance(delta, _CARRIED) and self._first else b""
        if self._request_id is None and payload:
            self._request_id = _identity.decode(payload).request_id
        if payload and delta.finish_reason is None:
            self._give(payload)
        else:  # what stands beside a finish is of the attempt, not of the answer
            self._give(self._event([piece(news.choice, news.token_ids, news.scored)]))
        return news

    def last(self) -> list[bytes]:
        choices = self.choices()
        told = [self._event([end(index, choice)]) for index, choice in enumerate(choices)]
        return [*told, self._event([], usage(len(self._prompt), choices))] if self._counts else told

    def _event(self, choices: list[dict[str, Any]], used: dict[str, int] | None = None) -> bytes:
        content: dict[str, Any] = {"request_id": self._request_id, "choices": choices}
        return msgspec.json.encode({**content, "usage": used, "output_mode": "tokens"})


class _Identity(msgspec.Struct, frozen=True):
    request_id: str = ""


_identity = msgspec.json.Decoder(_Identity)


def piece(index: int, token_ids: Sequence[int], scored: Sequence[Scored | Ranked] | None) -> dict[str, Any]:
    """A choice's new tokens in one chunk, in vLLM's shape."""
    return {
        "index": index,
        "token_ids": token_ids,
        "logprobs": logprobs(scored),
        "finish_reason": None,
        "stop_reason": None,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
    }


def end(index: int, choice: Choice) -> dict[str, Any]:
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


def logprobs(scored: Sequence[Scored | Ranked] | None) -> dict[str, Any] | None:
    return None if scored is None else {"content": list(scored)}


def usage(prompt: int, choices: Sequence[Choice]) -> dict[str, int]:
    made = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
