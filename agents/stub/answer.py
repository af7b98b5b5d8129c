"""Giving the answer of one generation, streamed or whole, up to its end or to the fault that strikes it.

The invariant: with a fault after N tokens, exactly the first N reach the client, however they are chunked.
"""

from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from relight.agents.stub import shapes
from relight.agents.stub.engine import Engine, EngineError
from relight.agents.stub.generation import Generation
from relight.agents.stub.sampling import Body, error_body
from relight.agents.stub.shapes import TOKENS, Words
from relight.agents.stub.wire import Add

INTERNAL = "InternalServerError"


class Answer:
    """One answer being given. `limit` tokens of the first choice arrive before `fault` strikes."""

    def __init__(  # noqa: PLR0913 - one answer
        self,
        request: web.Request,
        engine: Engine,
        body: Body,
        limit: int | None,
        fault: str,
        *,
        words: Words = TOKENS,
    ) -> None:
        self.request = request
        self.engine = engine
        self.body = body
        self.limit = limit
        self.fault = fault
        self.words = words
        self.interval = body.sampling_params.stream_interval or engine.settings.stream_interval

    async def give(self, add: Add, plain_id: str) -> web.StreamResponse:
        """Generate and answer; leaves nothing in the core when the client goes."""
        try:
            generation = self.engine.begin(self.words.name(plain_id), add)
        except EngineError as error:
            return web.json_response(error_body(str(error), INTERNAL, 500), status=500)
        if self.engine.draining:
            self.engine.abort([generation.request_id])
        self.engine.load += 1
        try:
            headers = {"X-Request-Id": plain_id}
            return await (self._stream if self.body.stream else self._whole)(generation, headers)
        finally:
            self.engine.load -= 1
            self.engine.leave(generation)

    async def _stream(self, generation: Generation, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        await response.prepare(self.request)
        async for choices in self._choices(generation):
            await response.write(b"".join(self.words.chunk(generation, [each]) for each in choices))
        options = self.body.stream_options
        struck = self._struck(generation)
        error = generation.error or ("Internal server error" if self.fault in ("error", "error_done") else "")
        if struck and self.fault == "cut" and self.request.transport is not None:
            self.request.transport.abort()
        elif struck and self.fault == "hang":
            await self.engine.dead.wait()
        elif struck and self.fault == "abort":
            part = generation.parts[0]
            end = {**shapes.choice(part, 0, part.sent, body=self.body, knobs=self.engine.knobs)}
            spans = _clipped(part.spans(), part.sent)
            await response.write(
                self.words.chunk(generation, [{**end, "finish_reason": "abort", "weight_versions": spans}])
            )
        elif struck and self.fault == "eof":
            return response
        elif error and (struck or generation.error):
            await response.write(shapes.event(error_body(error, INTERNAL, 500)))
        elif options is not None and options.include_usage:
            used = shapes.usage(generation, len(self.body.token_ids))
            told = {name: count for name, count in used.items() if count is not None}
            await response.write(self.words.chunk(generation, [], told))
        if not (struck and self.fault == "error"):
            await response.write(shapes.DONE)
        return response

    async def _whole(self, generation: Generation, headers: dict[str, str]) -> web.StreamResponse:
        collected: dict[int, dict[str, Any]] = {}
        self.interval = self.engine.settings.max_model_len
        async for choices in self._choices(generation):
            for each in choices:
                _join(collected, each)
        if self._struck(generation):
            match self.fault:
                case "cut" if self.request.transport is not None:
                    self.request.transport.abort()
                case "hang":
                    await self.engine.dead.wait()
                case "abort":
                    first = collected.setdefault(
                        0, shapes.choice(generation.parts[0], 0, 0, body=self.body, knobs=self.engine.knobs)
                    )
                    first["finish_reason"] = "abort"
                    first["weight_versions"] = _clipped(generation.parts[0].spans(), generation.parts[0].sent)
                case _:
                    generation.error = "Internal server error"
        if generation.error:
            return web.json_response(error_body(generation.error, INTERNAL, 500), status=500, headers=headers)
        listed = [collected[index] for index in sorted(collected)]
        content = self.words.whole(generation, listed, self.body, self.engine.settings.served_model_name)
        return web.Response(body=shapes.encode(content), content_type="application/json", headers=headers)

    async def _choices(self, generation: Generation) -> AsyncIterator[list[dict[str, Any]]]:
        """Choices as they become due: the first token at once, then each interval, then the finish."""
        while True:
            due: list[dict[str, Any]] = []
            for index, part in enumerate(generation.parts):
                new = len(part.tokens) - part.sent
                whole = part.finish is not None or (index == 0 and self._full(generation))
                told = part.finish is not None and part.told
                if told or not (whole or (new and (part.sent == 0 or new >= self.interval))):
                    continue
                upto = len(part.tokens)
                if index == 0 and self.limit is not None:
                    upto = min(upto, self.limit)
                chosen = shapes.choice(part, index, upto, body=self.body, knobs=self.engine.knobs)
                if index == 0 and self._full(generation):
                    chosen["finish_reason"] = chosen["stop_reason"] = chosen["weight_versions"] = None
                if chosen["token_ids"] or chosen["finish_reason"]:
                    due.append(chosen)
                part.sent, part.told = upto, part.finish is not None
            if due:
                yield due
            if generation.over or self._full(generation):
                return
            await generation.changed.wait()
            generation.changed.clear()

    def _full(self, generation: Generation) -> bool:
        return self.limit is not None and len(generation.parts[0].tokens) >= self.limit

    def _struck(self, generation: Generation) -> bool:
        return self._full(generation) and self.fault != "none"


def _clipped(spans: list[dict[str, Any]], end: int) -> list[dict[str, Any]]:
    return [{**span, "end": min(span["end"], end)} for span in spans if span["start"] < end]


def _join(collected: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    first = collected.setdefault(piece["index"], piece)
    if first is piece:
        return
    first["token_ids"] += piece["token_ids"]
    if first["logprobs"] is not None:
        first["logprobs"]["content"] += piece["logprobs"]["content"]
    for field in ("finish_reason", "stop_reason", "weight_versions"):
        first[field] = piece[field]
