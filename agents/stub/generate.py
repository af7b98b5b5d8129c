"""The route /inference/v1/generate: what is refused, what is logged, and which fault strikes."""

import uuid

from aiohttp import web

from relight.agents.stub.answer import INTERNAL, Answer
from relight.agents.stub.engine import Engine
from relight.agents.stub.knobs import Knobs
from relight.agents.stub.log import access
from relight.agents.stub.sampling import BadRequest, Body, error_body, read_body
from relight.agents.stub.shapes import TOKENS, Words
from relight.agents.stub.texts import Spoken
from relight.agents.stub.wire import Add


async def generate(request: web.Request, engine: Engine) -> web.StreamResponse:
    """Answer one request; its access line is written as it arrives."""
    content = await request.read()
    if request.content_type != "application/json":
        access(request, 400)
        wrong = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        return web.json_response(error_body(wrong, "Bad Request", 400), status=400)
    header = request.headers.get("X-Request-Id")
    try:
        body, add = read_body(content, engine.settings)
        if body.model not in (None, engine.settings.served_model_name):
            access(request, 404)
            message = (
                f"The model `{body.model}` does not exist. Valid aliases: {engine.settings.served_model_name}"
            )
            return web.json_response(error_body(message, "NotFoundError", 404, "model"), status=404)
    except BadRequest as error:
        access(request, 400)
        return web.json_response(error_body(str(error), error.kind, 400, error.param), status=400)
    plain_id = header or body.request_id or uuid.uuid4().hex[:16]
    words = TOKENS if body.output_mode == "tokens" else Spoken(body.token_ids)
    return await answered(request, engine, (body, add), plain_id=plain_id, words=words)


async def answered(
    request: web.Request, engine: Engine, asked: tuple[Body, Add], *, plain_id: str, words: Words
) -> web.StreamResponse:
    """Answer what has been read, with the faults that the knobs ask for."""
    body, add = asked
    knobs = engine.knobs
    status = 500 if engine.ended else knobs.generate_status or 200
    access(
        request,
        status,
        request_id=words.name(plain_id),
        prompt=len(add.token_ids),
        max_tokens=add.max_tokens,
    )
    if status != 200:
        return _refusal(engine, status)
    fault = knobs.stream_fault if engine.strike() else "none"
    if fault == "silent":
        await engine.dead.wait()
    if fault == "empty" or (fault == "eof" and not body.stream):
        return web.Response(content_type="text/event-stream")
    answer = Answer(request, engine, body, _limit(knobs, fault), fault, words=words)
    return await answer.give(add, plain_id)


def _limit(knobs: Knobs, fault: str) -> int | None:
    return None if fault == "none" else knobs.stream_fault_after


def _refusal(engine: Engine, status: int) -> web.Response:
    headers: dict[str, str] = {}
    if engine.knobs.retry_after_s is not None:
        headers["Retry-After"] = str(engine.knobs.retry_after_s)
    if engine.ended:
        return web.json_response(error_body(engine.ended, INTERNAL, 500), status=500)
    kind = "ServiceUnavailableError" if status == 503 else INTERNAL
    body = error_body(f"refused with {status} by a knob", kind, status)
    return web.json_response(body, status=status, headers=headers)
