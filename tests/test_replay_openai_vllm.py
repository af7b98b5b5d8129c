"""Texts over a cut stream of a real vLLM engine: equal to the character, the logprob and the count."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
import openai
import pytest
from aiohttp import web

from relight.events.bus.embedded import Embedded, free_port
from relight.orchestrator.cli.demo.model import VOCABULARY, make
from tests.gateway_rig import MESSAGES, WITHIN_S, Told, ask, client_of, gateway
from tests.replay_job import E0, Orchestrator, orchestrator

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

START_S = 180.0
"""20 s on an idle machine; others may be at work on this one."""

FLAGS = (
    *("--served-model-name", "m", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "512", "--enable-scale-out"),
)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_tokenizer(directory: Path) -> None:
    """Bytes, pairs of letters and two special tokens: as many as the tiny model has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [each for each in alphabet if each.isascii() and each.islower()]
    pairs = list(itertools.product(letters, letters))[: VOCABULARY - 2 - len(alphabet)]
    words = {word: number for number, word in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    tokenizer: Any = Tokenizer(models.BPE(vocab=words, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    config |= {"clean_up_tokenization_spaces": False, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of one engine, which is started once for all tests here."""
    folder = tmp_path_factory.mktemp("vllm")
    make("vllm", folder / "model")
    add_tokenizer(folder / "model")
    port = free_port()
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TMPDIR": str(folder),
    }
    server = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            (*server, "--model", str(folder / "model"), "--port", str(port), *FLAGS),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            anyio.run(_healthy, port, process, folder / "log")
            yield port
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


async def _healthy(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    with anyio.fail_after(START_S):
        async with aiohttp.ClientSession() as http:
            while True:
                assert process.poll() is None, log.read_text()[-4000:]
                with suppress(aiohttp.ClientError):
                    async with http.get(f"http://127.0.0.1:{port}/health") as answer:
                        if answer.status == 200:
                            return
                await anyio.sleep(0.2)


class Cut(NamedTuple):
    """A way to the engine that breaks the next streams, each with the chunk that brings so many tokens."""

    port: int
    after: list[int]


def tokens_in(line: bytes) -> int:
    if not line.startswith(b"data: {"):
        return 0
    return sum(len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"])


@asynccontextmanager
async def cutting(engine: int) -> AsyncIterator[Cut]:
    after: list[int] = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{engine}") as http:

        async def forward(request: web.Request) -> web.StreamResponse:
            generates = request.path.endswith(("/completions", "/generate"))
            left = after.pop() if after and generates else sys.maxsize
            body, headers = await request.read(), {"Content-Type": "application/json"}
            async with http.request(request.method, request.path, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for line in answer.content:
                    await response.write(line)
                    left -= tokens_in(line)
                    if left <= 0 and request.transport is not None:
                        request.transport.abort()
                        break
            return response

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield Cut(int(runner.addresses[0][1]), after)
        finally:
            await runner.cleanup()


class World(NamedTuple):
    mind: Orchestrator
    engine: int
    client: openai.AsyncOpenAI
    cut: Cut
    incarnations: "itertools.count[int]"

    async def direct(self, kind: str, *, streamed: bool, **options: Any) -> Told:
        async with client_of(f"http://127.0.0.1:{self.engine}") as client:
            return await ask(client, kind, streamed=streamed, model="m", **options)

    async def reroute(self) -> None:
        """Have the engine routed again as soon as the gateway has told of the cut."""
        await self.mind.suspicion()
        await self.mind.route(E0, next(self.incarnations), self.cut.port)

    async def over_cuts(self, kind: str, *cuts: int, streamed: bool, **options: Any) -> Told:
        """Through the gateway, where each attempt but the last one is cut."""
        self.cut.after[:] = cuts[::-1]
        found: list[Told] = []
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:

                async def call() -> None:
                    found.append(await ask(self.client, kind, streamed=streamed, model="m", **options))

                tasks.start_soon(call)
                for _ in cuts:
                    await self.reroute()
        assert self.cut.after == []
        return found[0]


@pytest.fixture
async def world(server: Embedded, engine: int) -> AsyncIterator[World]:
    async with (
        orchestrator(server.url) as mind,
        gateway(server.url) as address,
        client_of(address) as client,
        cutting(engine) as cut,
    ):
        await mind.route(E0, 1, cut.port)
        yield World(mind, engine, client, cut, itertools.count(2))


async def test_a_text_goes_on_as_if_nothing_had_happened(world: World) -> None:
    """The tiny model's texts are full of broken characters: many of these cuts are within one."""
    for kind, streamed in itertools.product(("Hallo", "chat"), (True, False)):
        expected = await world.direct(kind, streamed=streamed, max_tokens=30)
        for cuts in ((1,), (4,), (6,), (20,), (4, 3)) if streamed else ((4,), (4, 3)):
            found = await world.over_cuts(kind, *cuts, streamed=streamed, max_tokens=30)
            assert len(found.ids) == 1
            assert found.said == expected.said, f"{kind}, cut after {cuts}"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_an_answer_has_the_shape_that_the_engine_gives_it(world: World, path: str) -> None:
    """Nobody who talks to the gateway can tell it from the engine, asked for ids and logprobs or not."""
    asked = {"prompt": "Hallo"} if path == "completions" else {"messages": MESSAGES}
    asked |= {"model": "m", "max_tokens": 5, "temperature": 0}
    scored = {"logprobs": True, "top_logprobs": 2} if path != "completions" else {"logprobs": 2}
    scored |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    gateway, engine = f"{world.client.base_url}{path}", f"http://127.0.0.1:{world.engine}/v1/{path}"
    async with aiohttp.ClientSession() as http:
        for body in (asked, {**asked, **scored}):
            told = [await events(http, url, {**body, "stream": True}) for url in (gateway, engine)]
            assert {shape(each) for each in told[0]} == {shape(each) for each in told[1]}
            body.pop("stream_options", None)
            whole = [await events(http, url, body) for url in (gateway, engine)]
            assert [anonymous(each) for each in whole[0]] == [anonymous(each) for each in whole[1]]
        # The same of what stands behind a seam.
        world.cut.after[:] = [2]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.reroute)
            over_a_cut = await events(http, gateway, {**asked, **scored, "stream": True})
        chunks = [each for each in over_a_cut if each["choices"]]
        assert {shape(each) for each in chunks} <= {shape(each) for each in told[1]}
        assert over_a_cut[-1]["usage"] == told[1][-1]["usage"]
        assert world.cut.after == []


async def events(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of each event, or of the whole answer."""
    async with http.post(url, json=body) as answer:
        content = (await answer.read()).decode()
        assert answer.status == 200, content
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line[:1] in ("d", "{")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def shape(found: Any) -> Any:
    """Its keys, all the way down, and what of it is null."""
    if isinstance(found, dict):
        return tuple((name, shape(value)) for name, value in found.items() if name != "top_logprobs")
    if isinstance(found, list):
        return tuple(dict.fromkeys(shape(each) for each in found))
    return None if found is None else "there"


def anonymous(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}
