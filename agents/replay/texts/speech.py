"""How an engine is asked for a text: in the caller's own words, or by tokens behind a seam."""

from typing import Any

import msgspec

from relight.agents.replay.params import continued
from relight.agents.replay.request import headers_of
from relight.agents.replay.speech import Errand
from relight.agents.replay.stream import PATH as TOKENS
from relight.agents.replay.stream import Flight, Rejected
from relight.agents.replay.texts import seam, words
from relight.agents.replay.texts.asked import Asked
from relight.agents.replay.texts.flight import TextFlight
from relight.agents.replay.texts.script import Script

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class _Rendered(msgspec.Struct, frozen=True):
    token_ids: list[int]
    sampling_params: dict[str, Any]


class Own:
    """The caller's own words, for answers that cannot go on; nothing is added to them."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def flight(self, *, idle_s: float | None) -> Flight:
        # Of an answer that is no stream nothing comes before all of it.
        streamed = self._asked.streamed
        return TextFlight(idle_s=idle_s if streamed else None, streamed=streamed)

    async def send(self, flight: Flight, errand: Errand) -> None:
        headers = headers_of(errand.call, errand.request_id)
        path = ROUTES[self._asked.endpoint]
        await flight.open(
            errand.http, errand.address, self._asked.content, headers, path=path, after_s=errand.after_s
        )

    def names(self, request_id: str) -> list[str]:
        # Several choices or prompts have a number each; the request's own name stands for all of them.
        return (
            [f"cmpl-{request_id}-0"] if self._asked.endpoint == "completions" else [f"chatcmpl-{request_id}"]
        )


class Told(Own):
    """As a stream with token ids, and after a death by what `script` has kept."""

    def __init__(self, asked: Asked, script: Script) -> None:
        super().__init__(asked)
        self._script = script
        options = {"include_usage": True} if not asked.streamed else asked.fields.get("stream_options")
        added = {"stream": True, "return_token_ids": True, "stream_options": options}
        self._body = msgspec.json.encode({**asked.fields, **added})

    def flight(self, *, idle_s: float | None) -> Flight:
        return TextFlight(idle_s=idle_s)

    async def send(self, flight: Flight, errand: Errand) -> None:
        assert isinstance(flight, TextFlight)
        headers = headers_of(errand.call, errand.request_id)
        path, body = ROUTES[self._asked.endpoint], self._body
        if errand.ask.kept:
            path, body = TOKENS, await self._continuation(flight, errand)
            flight.reads = words.read_continued
        await flight.open(errand.http, errand.address, body, headers, path=path, after_s=errand.after_s)

    async def _continuation(self, flight: TextFlight, errand: Errand) -> bytes:
        """The request that goes on, with the parameters that this engine reads the caller's words as."""
        asked, ask, kept = self._asked, errand.ask, self._script.kept
        path = f"{ROUTES[asked.endpoint]}/render"
        answer = await seam.question(flight, errand, asked.content, path=path)
        request, rendered = _read(answer, path)
        if rendered.token_ids != kept.prompt:
            raise Rejected(409, f"{path}: the prompt reads differently here".encode())
        place = await seam.opened(asked, errand, kept, flight)
        flight.seam = None if place.passed else place
        params = continued(rendered.sampling_params, kept=ask.kept, attempt=0)
        if "seed" in ask.sampling_params:
            params["seed"] = ask.sampling_params["seed"]  # of this attempt
        added = {"token_ids": ask.token_ids, "sampling_params": params, "request_id": errand.request_id}
        answered = {"output_mode": "text", "stream": True, "stream_options": None}
        return msgspec.json.encode({**request, **added, **answered})

    def names(self, request_id: str) -> list[str]:
        return [*super().names(request_id), f"generate-tokens-{request_id}"]


def _read(answer: bytes, path: str) -> tuple[dict[str, Any], _Rendered]:
    """The one request that was rendered: as it is, and what of it is looked at."""
    try:
        told: list[dict[str, Any]] | dict[str, Any] = msgspec.json.decode(answer)
        request = told[0] if isinstance(told, list) else told
        return request, msgspec.convert(request, _Rendered)
    except (msgspec.MsgspecError, LookupError) as error:
        raise Rejected(502, f"{path}: {error}".encode()) from error
