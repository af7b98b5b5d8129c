"""The gateway, from outside: vLLM's shapes, replay under them, and what cannot be taken back said clearly."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import pytest

from relight.agents.replay.gateway import Settings, serve
from relight.agents.stub.launch import Stub, launch, make_model
from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.embedded import Embedded
from relight.events.errors import UsageError
from tests.replay_job import E0, E1, JOB, Orchestrator, orchestrator

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]
WITHIN_S = 30.0


class World(NamedTuple):
    """A gateway in front of two stub engines, of which nothing is routed yet."""

    mind: Orchestrator
    stubs: list[Stub]
    model: Path
    http: aiohttp.ClientSession
    url: str

    def post(self, **changes: Any) -> Any:
        return self.http.post(f"{self.url}/inference/v1/generate", json=body(**changes))


def body(*, stream: bool = False, n: int = 1, **changes: Any) -> dict[str, Any]:
    params = {"max_tokens": 100, "temperature": 0.0 if n == 1 else 1.0, "logprobs": 0, "n": n, "seed": 1}
    return {"token_ids": PROMPT, "sampling_params": params, "stream": stream, **changes}


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[list[Stub]]:
    model = make_model(tmp_path / "model", seed=1)
    with ExitStack() as stack:
        started = [stack.enter_context(launch(model, wait=False)) for _ in range(2)]
        for stub in started:
            stub.wait_until_listening()
            stub.post("/update_weight_version", {"new_version": "7.1"})
        yield started


@asynccontextmanager
async def gateway(url: str) -> AsyncGenerator[str]:
    async with anyio.create_task_group() as tasks:

        async def run(*, task_status: Any) -> None:
            await serve(bus_url=url, job=JOB, settings=Settings(port=0), task_status=task_status)

        port = await tasks.start(run)
        yield f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


@pytest.fixture
async def world(server: Embedded, stubs: list[Stub], tmp_path: Path) -> AsyncIterator[World]:
    async with (
        orchestrator(server.url) as mind,
        gateway(server.url) as url,
        aiohttp.ClientSession() as http,
    ):
        yield World(mind, stubs, tmp_path / "model", http, url)


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield msgspec.json.decode(line[6:])


async def test_a_whole_answer_survives_a_death_and_says_what_it_cost(world: World) -> None:
    world.stubs[0].knobs(exit_after_tokens=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    with anyio.fail_after(WITHIN_S):
        async with anyio.create_task_group() as tasks:

            async def route_the_next() -> None:
                await world.mind.suspicion()
                await world.mind.route(E1, 1, world.stubs[1].port)

            tasks.start_soon(route_the_next)
            async with world.post() as answer:
                assert answer.status == 200
                content = await answer.json()
    (choice,) = content["choices"]
    ids, logprobs = reference(weights_digest(world.model), PROMPT, 100)
    assert choice["token_ids"] == ids
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == logprobs
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "7.1", "start": 0, "end": 100}]
    assert content["usage"] == {"prompt_tokens": 3, "completion_tokens": 100, "total_tokens": 103}
    assert answer.headers["X-Relight-Attempts"] == "2"
    assert answer.headers["X-Relight-Kept-Tokens"] == "40"
    assert answer.headers["X-Request-Id"] == content["request_id"]


async def test_a_streamed_answer_goes_on_after_a_death(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    ids: list[int] = []
    last: dict[str, Any] = {}
    killed = False
    with anyio.fail_after(WITHIN_S):
        async with world.post(stream=True, request_id="mine") as answer:
            assert answer.headers["X-Request-Id"] == "mine"
            async for event in events(answer):
                (last,) = event["choices"]
                ids += last["token_ids"]
                if len(ids) >= 40 and not killed:
                    killed = True
                    os.kill(world.stubs[0].core, signal.SIGKILL)
                    await world.mind.route(E1, 1, world.stubs[1].port)
    assert ids == reference(weights_digest(world.model), PROMPT, 100)[0]
    assert last["finish_reason"] == "length"


async def test_what_cannot_be_continued_exactly_fails_clearly_after_the_first_byte(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    error: dict[str, Any] = {}
    killed = False
    with anyio.fail_after(WITHIN_S):
        async with world.post(stream=True, n=2) as answer:
            async for event in events(answer):
                error = event.get("error", {})
                if not killed:
                    killed = True
                    os.kill(world.stubs[0].core, signal.SIGKILL)
                    await world.mind.route(E1, 1, world.stubs[1].port)
    assert error["code"] == 502
    assert "n > 1" in error["message"]


async def test_the_callers_own_fault_has_the_engines_status_and_words(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.post(model="another") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["type"] == "NotFoundError"
    async with world.post(token_ids="text") as answer:
        assert answer.status == 400
        assert "token_ids" in (await answer.json())["error"]["message"]
    for stream in (False, True):
        async with world.post(sampling_params={"max_tokens": "x"}, stream=stream) as answer:
            assert answer.status == 400
            assert "max_tokens" in (await answer.json())["error"]["message"]


async def test_a_client_that_goes_leaves_nothing_running_in_the_engine(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    with anyio.fail_after(WITHIN_S):
        async with world.post(stream=True) as answer:
            await answer.content.readany()
            answer.close()
        while True:
            async with world.http.get(f"http://127.0.0.1:{world.stubs[0].port}/load") as load:
                if (await load.json())["server_load"] == 0:
                    break


async def test_health_models_and_what_is_not_served(world: World) -> None:
    async with world.http.get(f"{world.url}/health") as answer:
        assert answer.status == 503
    async with world.http.get(f"{world.url}/v1/models") as answer:
        assert answer.status == 503
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.post() as answer:  # waits for the route
        assert answer.status == 200
    async with world.http.get(f"{world.url}/health") as answer:
        assert answer.status == 200
    async with world.http.get(f"{world.url}/v1/models") as answer:
        assert (await answer.json())["object"] == "list"
    async with world.http.post(f"{world.url}/v1/embeddings", json={}) as answer:
        assert answer.status == 501


async def test_a_stopping_gateway_finishes_the_calls_under_way(
    server: Embedded, stubs: list[Stub], tmp_path: Path
) -> None:
    async with orchestrator(server.url) as mind, aiohttp.ClientSession() as http:
        await mind.route(E0, 1, stubs[0].port)
        async with anyio.create_task_group() as tasks:

            async def run(*, task_status: Any) -> None:
                await serve(bus_url=server.url, job=JOB, settings=Settings(port=0), task_status=task_status)

            port = await tasks.start(run)
            with anyio.CancelScope(shield=True), anyio.fail_after(WITHIN_S):
                url = f"http://127.0.0.1:{port}/inference/v1/generate"
                async with http.post(url, json=body(stream=True)) as answer:
                    tasks.cancel_scope.cancel()
                    ids = [token async for event in events(answer) for token in tokens(event)]
    assert ids == reference(weights_digest(tmp_path / "model"), PROMPT, 100)[0]


def tokens(event: dict[str, Any]) -> list[int]:
    return [token for choice in event["choices"] for token in choice["token_ids"]]


async def test_a_port_that_is_taken_is_a_wrong_usage(server: Embedded, stubs: list[Stub]) -> None:
    with pytest.raises(UsageError, match="cannot listen"):
        await serve(bus_url=server.url, job=JOB, settings=Settings(port=stubs[0].port))


@asynccontextmanager
async def command(bus: str, http: aiohttp.ClientSession, port: int) -> AsyncGenerator[tuple[Any, str]]:
    """`relight gateway` as a process that has a route, and its address."""
    words = ("gateway", "--bus", bus, "--job", JOB, "--port", str(port))
    process = subprocess.Popen([sys.executable, "-m", "relight.orchestrator.cli", *words])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with suppress(aiohttp.ClientError):
                async with http.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        break
            assert process.poll() is None
            await anyio.sleep(0.05)
        yield process, f"{url}/inference/v1/generate"
    finally:
        process.kill()
        process.wait()


async def test_the_command_drains_at_sigterm_and_is_cut_off_by_a_second_one(
    server: Embedded, stubs: list[Stub], tmp_path: Path, free_port: int
) -> None:
    async with orchestrator(server.url) as mind, aiohttp.ClientSession() as http:
        await mind.route(E0, 1, stubs[0].port)
        with anyio.fail_after(WITHIN_S):
            async with command(server.url, http, free_port) as (process, url):
                async with http.post(url, json=body(stream=True)) as answer:
                    process.send_signal(signal.SIGTERM)
                    ids = [token async for event in events(answer) for token in tokens(event)]
                assert await anyio.to_thread.run_sync(process.wait) == 0
            assert ids == reference(weights_digest(tmp_path / "model"), PROMPT, 100)[0]
        stubs[0].knobs(stream_fault="hang", stream_fault_after=5)
        with anyio.fail_after(WITHIN_S):
            async with (
                command(server.url, http, free_port) as (process, url),
                http.post(url, json=body(stream=True)) as answer,
            ):
                await anext(events(answer))
                process.send_signal(signal.SIGTERM)
                with pytest.raises(OSError, match="connect"):
                    while True:  # until it accepts nobody any more
                        await (await anyio.connect_tcp("127.0.0.1", free_port)).aclose()
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(process.wait) == -signal.SIGTERM
