"""OpenAI's own client, unchanged, in front of the gateway: what it gets when an engine dies under it."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
import msgspec
import openai
import pytest
from aiohttp import web

from relight.agents.replay import gateway as gateway_module
from relight.agents.stub.knobs import Knobs
from relight.agents.stub.launch import Stub, launch, make_model
from relight.events.bus.embedded import Embedded
from tests.gateway_rig import MESSAGES, WITHIN_S, Told, ask, client_of, gateway
from tests.replay_job import E0, E1, Orchestrator, orchestrator

pytestmark = pytest.mark.anyio

KINDS = ("Hello, Zürich", "chat")


class World(NamedTuple):
    """OpenAI's client at a gateway before a stub engine that outlives the test."""

    mind: Orchestrator
    stub: Stub
    model: str
    client: openai.AsyncOpenAI
    address: str

    @property
    def engine(self) -> str:
        """The stub's own address."""
        return f"http://127.0.0.1:{self.stub.port}"

    async def uninterrupted(self, kind: str, *, streamed: bool, **options: Any) -> Told:
        """What the engine answers when nobody stands before it and nothing happens."""
        async with client_of(self.engine) as client:
            return await ask(client, kind, streamed=streamed, model=self.model, **options)

    async def reroute(self, *incarnations: int) -> None:
        """Have the engine routed again, once for each death that the gateway tells of."""
        for incarnation in incarnations:
            await self.mind.suspicion()
            await self.mind.route(E0, incarnation, self.stub.port)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base", seed=1)


@pytest.fixture(scope="module")
def standing(model: Path) -> Iterator[Stub]:
    with launch(model) as stub:
        yield stub


@pytest.fixture
async def world(server: Embedded, standing: Stub, model: Path) -> AsyncIterator[World]:
    standing.knobs(**msgspec.structs.asdict(Knobs()))
    async with (
        orchestrator(server.url) as mind,
        gateway(server.url) as address,
        client_of(address) as client,
    ):
        yield World(mind, standing, str(model), client, address)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_an_answer_over_an_engines_death_is_the_uninterrupted_one(
    world: World, model: Path, kind: str, streamed: bool
) -> None:
    expected = await world.uninterrupted(kind, streamed=streamed)
    found: list[Told] = []
    with launch(model, "--exit-after-tokens", "40") as dying:
        await world.mind.route(E1, 1, dying.port)
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(world.reroute, 1)
                found.append(await ask(world.client, kind, streamed=streamed, model=world.model))
        dying.process.wait(WITHIN_S)
    assert found[0].said == expected.said
    assert len(found[0].ids) == 1
    assert len(found[0].token_ids) == 100


@pytest.mark.parametrize("interval", [1, 3], ids=["each token by itself", "three tokens a chunk"])
async def test_an_answer_goes_on_at_each_of_its_tokens(world: World, interval: int) -> None:
    """Every second one of these tokens ends within a character, where an engine cannot go on spelling."""
    options: dict[str, Any] = {"max_tokens": 24, "extra_body": {"stream_interval": interval}}
    expected = await world.uninterrupted("seam", streamed=True, **options)
    await world.mind.route(E0, 1, world.stub.port)
    for cut in range(1, 24):
        world.stub.knobs(stream_fault="cut", stream_fault_after=cut, stream_fault_times=1)
        found: list[Told] = []
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:

                async def call() -> None:
                    found.append(  # noqa: B023 - runs within this round
                        await ask(world.client, "seam", streamed=True, model=world.model, **options)
                    )

                tasks.start_soon(call)
                await world.mind.suspicion()
                await world.mind.route(E0, cut + 1, world.stub.port)
        assert found[0].said == expected.said, f"cut after {cut} tokens"


async def test_several_choices_are_given_anew_before_the_first_byte_and_fail_after_it(world: World) -> None:
    options: dict[str, Any] = {"prompt": "n", "model": world.model, "max_tokens": 50, "n": 2, "seed": 3}
    async with client_of(world.engine) as direct:
        expected = await direct.completions.create(**options)
    cut: dict[str, Any] = {"stream_fault": "cut", "stream_fault_after": 20}
    # A connection that ends before any byte of an answer is tried once more at the same engine.
    world.stub.knobs(**cut, stream_fault_times=2)
    await world.mind.route(E0, 1, world.stub.port)
    with anyio.fail_after(WITHIN_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.reroute, 2)
            found = await world.client.completions.create(**options)
        assert [each.text for each in found.choices] == [each.text for each in expected.choices]
        world.stub.knobs(**cut, stream_fault_times=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.reroute, 3)
            stream = await world.client.completions.create(**options, stream=True)
            with pytest.raises(openai.APIError, match=r"cannot be continued exactly \(n > 1\)"):
                async for _ in stream:
                    pass


async def test_text_without_token_ids_goes_through_and_fails_clearly_at_a_death(world: World) -> None:
    world.stub.knobs(no_token_ids=True)
    expected = await world.uninterrupted("chat", streamed=True)
    assert (expected.token_ids, len(expected.text) > 50) == ([], True)
    world.stub.knobs(no_token_ids=True, stream_fault="cut", stream_fault_after=20, stream_fault_skip=1)
    await world.mind.route(E0, 1, world.stub.port)
    with anyio.fail_after(WITHIN_S):
        found = await ask(world.client, "chat", streamed=True, model=world.model)
        assert found.said == expected.said
        with pytest.raises(openai.APIError, match="text without token ids"):
            await ask(world.client, "chat", streamed=True, model=world.model)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_the_engines_refusals_go_through_unchanged(world: World, streamed: bool) -> None:
    await world.mind.route(E0, 1, world.stub.port)
    path = "/v1/chat/completions"
    wrong: list[dict[str, Any]] = [
        {"model": "another", "messages": MESSAGES},
        {"model": world.model, "messages": MESSAGES, "max_tokens": 9999},
        {"model": world.model, "messages": MESSAGES, "max_tokens": "many"},
        {"model": world.model},
    ]
    async with aiohttp.ClientSession() as http:
        for body in wrong:
            told: list[tuple[int, bytes]] = []
            for address in (world.address, world.engine):
                async with http.post(address + path, json={**body, "stream": streamed}) as answer:
                    told.append((answer.status, await answer.read()))
            assert told[0] == told[1]
            assert 400 <= told[0][0] < 500
        async with http.post(world.address + path, data=b"[1]") as answer:
            assert answer.status == 400
    with pytest.raises(openai.NotFoundError):
        await world.client.chat.completions.create(model="another", messages=MESSAGES)


async def test_a_request_that_kills_three_engines_is_refused_and_not_sent_again(world: World) -> None:
    """OpenAI's client sends what fails with 5xx again by itself."""
    world.stub.knobs(stream_fault="cut")
    await world.mind.route(E0, 1, world.stub.port)
    with anyio.fail_after(WITHIN_S):
        async with anyio.create_task_group() as tasks, client_of(world.address, max_retries=5) as client:
            tasks.start_soon(world.reroute, 2, 3)
            with pytest.raises(openai.UnprocessableEntityError, match="may be their cause"):
                await client.completions.create(prompt="poison", model=world.model)


async def test_headers_and_the_last_comment_say_what_it_cost(world: World) -> None:
    cut: dict[str, Any] = {"stream_fault": "cut", "stream_fault_after": 20, "stream_fault_times": 1}
    world.stub.knobs(**cut)
    await world.mind.route(E0, 1, world.stub.port)
    options: dict[str, Any] = {"prompt": "cost", "model": world.model, "max_tokens": 40, "temperature": 0}
    with anyio.fail_after(WITHIN_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.reroute, 2)
            raw = await world.client.completions.with_raw_response.create(
                **options, extra_headers={"X-Request-Id": "mine"}
            )
        assert raw.headers["x-request-id"] == "mine"
        assert (raw.headers["x-relight-attempts"], raw.headers["x-relight-kept-tokens"]) == ("2", "20")
        world.stub.knobs(**cut)
        async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as http:
            tasks.start_soon(world.reroute, 3)
            url, body = f"{world.address}/v1/completions", {**options, "stream": True}
            async with http.post(url, json=body) as answer:
                lines = (await answer.read()).decode().split("\n\n")
    assert answer.headers["X-Relight-Attempts"] == "1"  # as of the first byte
    assert lines[-3:] == [": relight attempts=2 kept=20", "data: [DONE]", ""]
    assert sum('"finish_reason":"length"' in line for line in lines) == 1
    assert not any('token_ids":[' in line for line in lines)


async def test_a_client_that_goes_ends_its_call_in_the_engine(world: World) -> None:
    await world.mind.route(E0, 1, world.stub.port)
    with anyio.fail_after(WITHIN_S):
        options: dict[str, Any] = {"model": world.model, "messages": MESSAGES, "max_tokens": 400}
        stream = await world.client.chat.completions.create(**options, stream=True)
        await anext(aiter(stream))
        await stream.close()
        async with aiohttp.ClientSession(world.engine) as http:
            while True:
                async with http.get("/load") as load:
                    if (await load.json())["server_load"] == 0:
                        break


async def test_a_call_that_finds_no_route_is_told_when_to_come_again(server: Embedded) -> None:
    async with (
        orchestrator(server.url),
        gateway(server.url, recovery_timeout_s=0.2) as address,
        client_of(address) as client,
    ):
        for streamed in (True, False):
            with pytest.raises(openai.InternalServerError) as told:
                await ask(client, "chat", streamed=streamed, model="m")
            assert told.value.status_code == 503
            assert told.value.response.headers["retry-after"] == "5"
            assert told.value.body is not None
            assert "no route within 0.2 s" in str(told.value.body)


async def test_a_slow_reader_slows_its_engine_and_fills_no_memory(server: Embedded) -> None:
    """An engine that would send a GiB, and a reader that reads nothing of it."""
    written = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        choice = {"index": 0, "text": "x" * 1024, "token_ids": [1], "finish_reason": None}
        event = b"data: " + json.dumps({"id": "cmpl-x", "choices": [choice]}).encode() + b"\n\n"
        for _ in range(2**20):
            await response.write(event)
            written += len(event)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", endless)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with (
        orchestrator(server.url) as mind,
        gateway(server.url) as address,
        aiohttp.ClientSession() as http,
    ):
        await mind.route(E0, 1, int(runner.addresses[0][1]))
        with anyio.fail_after(WITHIN_S):
            body = {"prompt": "x", "max_tokens": 2**21, "stream": True}
            async with http.post(f"{address}/v1/completions", json=body) as answer:
                before = -1
                while before != written:  # until a second goes by in which nobody gets on
                    before = written
                    await anyio.sleep(1.0)
                assert 0 < written < 32 * 2**20
                answer.close()
    await runner.cleanup()


async def test_a_body_that_is_too_large_is_refused_as_everything_is(
    server: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "BODY_LIMIT", 1000)
    async with orchestrator(server.url), gateway(server.url) as address, client_of(address) as client:
        with pytest.raises(openai.APIStatusError) as told:
            await client.completions.create(model="m", prompt="x" * 2000)
        assert told.value.status_code == 413
        assert isinstance(told.value.body, dict)
        async with aiohttp.ClientSession() as http, http.get(f"{address}/metrics") as answer:
            assert "relight_replay_turns_total" in await answer.text()
