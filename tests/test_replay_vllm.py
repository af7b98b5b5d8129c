"""Replay with real vLLM: interrupted turns equal the uninterrupted one, to the token and to the logprob.

What dies is a relay in front of the engine, which passes on as many tokens as it is told and then breaks the
connection: so every cut point is hit exactly, and one engine serves all of it. That a killed engine's stream
ends so, and how, is for the demo's tests.
"""

import importlib.util
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from relight.agents.replay.client import ReplayClient
from relight.agents.replay.sse import Events
from relight.agents.replay.turn import End, Turn
from relight.agents.replay.wire import scored
from relight.events.bus.embedded import Embedded
from tests.replay_job import E0, E1, JOB, Orchestrator, orchestrator
from tests.replay_rig import Asked, Play, heard, rest, scripted
from tests.vllm_engine import Engine, vllm_engine

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPT = list(range(20, 37))
LENGTH = 48
TOLERANCE = 1e-4
"""In nats: float32 in one process, batched otherwise."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with vllm_engine(tmp_path_factory.mktemp("vllm")) as ready:
        ready.post("/update_weight_version", {"new_version": "7.1"})
        yield ready


@pytest.fixture
async def mind(server: Embedded) -> AsyncIterator[Orchestrator]:
    async with orchestrator(server.url) as speaking:
        yield speaking


@pytest.fixture(scope="module")
def whole(engine: Engine) -> tuple[list[int], list[float]]:
    """The uninterrupted generation."""
    choice = engine.generate(PROMPT, **params())["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def params(**changes: Any) -> dict[str, Any]:
    return {"max_tokens": LENGTH, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, **changes}


def relay_to(engine: Engine, *, tokens: int) -> Play:
    """Pass on the first `tokens`, then break the connection."""

    async def play(request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        passed, events = 0, Events()
        url = f"http://127.0.0.1:{engine.port}{asked.path}"
        async with aiohttp.ClientSession() as http, http.post(url, json=asked.body) as answer:
            async for data in answer.content.iter_any():
                for payload in events.feed(data):
                    if passed == tokens or payload == b"[DONE]":
                        break
                    await response.write(b"data: " + payload + b"\n\n")
                    passed += sum(len(each.token_ids or ()) for each in scored.decode(payload).choices)
                if passed >= tokens:
                    return response
        raise AssertionError(f"{passed} tokens came of {tokens}")

    return play


@pytest.mark.parametrize("mode", ["continue", "restart"])
async def test_a_turn_that_is_cut_at_any_point_equals_the_uninterrupted_one(
    mind: Orchestrator, server: Embedded, engine: Engine, whole: tuple[list[int], list[float]], mode: Any
) -> None:
    ids, logprobs = whole
    for incarnation, cut in enumerate((1, 7, 16, 31, LENGTH - 1), start=1):
        async with scripted(relay_to(engine, tokens=cut)) as dying:
            await mind.route(E0, incarnation, dying.port)
            async with (
                ReplayClient(server.url, job=JOB, mode=mode, check_seam=math.inf) as client,
                client.stream(PROMPT, params()) as pieces,
            ):
                await heard(pieces, cut)
                await mind.route(E1, incarnation, engine.port)
                turn = await rest(pieces)
            await mind.fence(E1, incarnation)
        assert turn.token_ids == ids, cut
        assert turn.finish_reason == "length"
        assert turn.logprobs is not None
        assert max(abs(a - b) for a, b in zip(turn.logprobs, logprobs, strict=True)) < TOLERANCE
        first, second = turn.attempts
        assert cut <= first.made < LENGTH  # a busy server sends several tokens in one chunk
        assert first.reason == End.EOF
        if mode == "continue":
            assert (second.kept, second.max_tokens) == (first.made, LENGTH - first.made)
            assert second.seam_drift is not None
            assert second.seam_drift < TOLERANCE
        else:
            assert (second.kept, second.seam_drift) == (0, None)
        assert [(span.version, span.start, span.end) for span in turn.versions] == [("7.1", 0, LENGTH)]
        assert_integrity(engine, turn)


def assert_integrity(engine: Engine, turn: Turn) -> None:
    """The engine scores the whole of the turn as it was recorded, on both sides of the seam."""
    told = engine.generate([*PROMPT, *turn.token_ids], max_tokens=1, temperature=0.0, prompt_logprobs=0)
    assert turn.logprobs is not None
    places = zip(told["prompt_logprobs"][len(PROMPT) :], turn.token_ids, turn.logprobs, strict=True)
    for entry, token_id, logprob in places:
        assert abs(entry[str(token_id)]["logprob"] - logprob) < TOLERANCE


async def test_a_seeded_turn_is_repeated_by_a_replay_and_goes_on_as_a_sample_by_a_continuation(
    mind: Orchestrator, server: Embedded, engine: Engine
) -> None:
    sampled = params(temperature=1.0, seed=7)
    ids = engine.generate(PROMPT, **sampled)["choices"][0]["token_ids"]
    turns: list[Turn] = []
    for incarnation, mode in enumerate(("restart", "continue"), start=1):
        async with scripted(relay_to(engine, tokens=20)) as dying:
            await mind.route(E0, incarnation, dying.port)
            options: dict[str, Any] = {"mode": mode}
            async with (
                ReplayClient(server.url, job=JOB, **options) as client,
                client.stream(PROMPT, sampled) as pieces,
            ):
                await heard(pieces, 20)
                await mind.route(E1, incarnation, engine.port)
                turns.append(await rest(pieces))
            await mind.fence(E1, incarnation)
        assert_integrity(engine, turns[-1])
    replayed, continued = turns
    assert replayed.token_ids == ids
    assert continued.token_ids[:20] == ids[:20]
    assert len(continued.token_ids) == LENGTH


async def test_a_turn_that_its_caller_leaves_is_aborted_in_the_engine(
    mind: Orchestrator, server: Embedded, engine: Engine
) -> None:
    await mind.route(E0, 1, engine.port)
    async with ReplayClient(server.url, job=JOB) as client:
        async with client.stream(PROMPT, params(max_tokens=400)) as pieces:
            await heard(pieces, 3)
        with anyio.fail_after(30):
            while engine.running() > 0:
                await anyio.sleep(0.05)
        assert pieces.turn.attempts[0].reason is End.CANCELLED
