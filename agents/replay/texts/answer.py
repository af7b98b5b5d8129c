"""The gateway's answers to `/v1/completions` and `/v1/chat/completions`, streamed and whole."""

from aiohttp import web

from relight.agents.replay.client import ReplayClient
from relight.agents.replay.generation import Generation
from relight.agents.replay.passing import passed_on
from relight.agents.replay.refusals import failed, headers_of
from relight.agents.replay.speech import Speech
from relight.agents.replay.streaming import streamed
from relight.agents.replay.texts.asked import Asked, Endpoint, read
from relight.agents.replay.texts.relay import Relay
from relight.agents.replay.texts.script import Script
from relight.agents.replay.texts.speech import Own, Told
from relight.agents.replay.texts.whole import whole
from relight.agents.replay.turn import ReplayError


async def answer(endpoint: Endpoint, client: ReplayClient, request: web.Request) -> web.StreamResponse:
    """Answer one request, with replay under it."""
    asked = read(endpoint, await request.read())
    session = request.headers.get("X-Session-ID") or asked.session
    ledger, speech = _parts(asked)
    with client.speaking(speech, ledger, session=session, headers=passed_on(request)) as generation:
        if asked.streamed:
            return await streamed(request, ledger, generation)
        return await _whole(asked, ledger, generation)


def _parts(asked: Asked) -> tuple[Script | Relay, Speech]:
    if asked.why_replayed is not None:
        return Relay(asked.choices, why=asked.why_replayed), Own(asked)
    script = Script(asked)
    return script, Told(asked, script)


async def _whole(asked: Asked, ledger: Script | Relay, generation: Generation) -> web.StreamResponse:
    try:
        while not generation.done:
            await generation.step()
    except ReplayError as error:
        return failed(error)
    payloads = [*ledger.take(), *ledger.last()]
    content = whole(asked, payloads) if isinstance(ledger, Script) else payloads[-1]
    return web.Response(body=content, content_type="application/json", headers=headers_of(generation.turn()))
