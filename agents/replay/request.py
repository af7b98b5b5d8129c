"""Tokens in, tokens out: the requests of one attempt, as bytes and headers, and how they are sent."""

import msgspec

from relight.agents.replay.drift import PARAMS
from relight.agents.replay.ledger import Ask
from relight.agents.replay.limits import Call
from relight.agents.replay.speech import Errand
from relight.agents.replay.stream import Flight


def request_of(call: Call, ask: Ask, request_id: str) -> bytes:
    """A streamed generation; the caller's further fields are passed on and override nothing."""
    return _body(
        call,
        request_id=request_id,
        token_ids=ask.token_ids,
        sampling_params=ask.sampling_params,
        stream=True,
    )


def probe_of(call: Call, ask: Ask, request_id: str) -> bytes:
    """The same tokens to be scored; see `drift`."""
    return _body(call, request_id=request_id, token_ids=ask.token_ids, sampling_params=PARAMS, stream=False)


def headers_of(call: Call, request_id: str) -> dict[str, str]:
    headers = {**call.headers, "Content-Type": "application/json", "X-Request-Id": request_id}
    if call.session is not None:
        headers.setdefault("X-Session-ID", call.session)
    return headers


def _body(call: Call, **fields: object) -> bytes:
    return msgspec.json.encode({**call.extra, **fields})


class Tokens:
    """The speech of tokens. `ranked`: candidates were asked for."""

    def __init__(self, *, ranked: bool) -> None:
        self._ranked = ranked

    def flight(self, *, idle_s: float | None) -> Flight:
        return Flight(ranked=self._ranked, idle_s=idle_s)

    async def send(self, flight: Flight, errand: Errand) -> None:
        body = request_of(errand.call, errand.ask, errand.request_id)
        headers = headers_of(errand.call, errand.request_id)
        await flight.open(errand.http, errand.address, body, headers, after_s=errand.after_s)

    def names(self, request_id: str) -> list[str]:
        return [request_id, f"generate-tokens-{request_id}"]
