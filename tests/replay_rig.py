"""What replay tests drive turns against: stub engines that a module shares, and engines that play a script.

Each test finds the shared stubs alive, without faults and labelled 7.1. A scripted engine is a real server
that keeps what it was asked, and answers as the test says: with bytes of its choice, or with exactly the
tokens that the stub's weights would give.
"""

import http.client
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from relight.agents.replay.client import Pieces, ReplayClient
from relight.agents.replay.turn import End, Turn
from relight.agents.stub.knobs import Knobs
from relight.agents.stub.launch import Stub, launch, make_model
from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.embedded import Embedded
from tests.replay_job import JOB, Orchestrator

PROMPT = [5, 6, 7]
WITHIN_S = 30.0
LABEL = "7.1"


class Fleet:
    """Stubs of the same weights."""

    def __init__(self, model: Path, flags: Sequence[str], stack: ExitStack) -> None:
        self.model = model
        self.digest = weights_digest(model)
        self.stubs: list[Stub] = []
        self._flags = flags
        self._stack = stack

    def reference(self, length: int, prompt: Sequence[int] = PROMPT) -> tuple[list[int], list[float]]:
        return reference(self.digest, prompt, length)

    def add(self, engines: int) -> None:
        """Start so many more."""
        new = [
            self._stack.enter_context(launch(self.model, *self._flags, wait=False)) for _ in range(engines)
        ]
        for stub in new:
            stub.wait_until_listening()
        self.stubs += new

    def ready(self) -> "Fleet":
        """As new: without faults, labelled, and another one in the place of each that a test has killed."""
        well = [stub for stub in self.stubs if _is_well(stub)]
        dead = len(self.stubs) - len(well)
        self.stubs = well
        self.add(dead)
        for stub in self.stubs:
            stub.knobs(**msgspec.structs.asdict(Knobs()))
            label(stub, LABEL)
            stub.lines.clear()
        return self


def _is_well(stub: Stub) -> bool:
    """Whether its core answers."""
    try:
        return stub.get("/is_paused", timeout_s=1.0).status == 200
    except (OSError, http.client.HTTPException):
        return False


@contextmanager
def fleet(folder: Path, *flags: str, engines: int) -> Iterator[Fleet]:
    """So many stubs, for as many tests as like."""
    with ExitStack() as stack:
        started = Fleet(make_model(folder / "model", seed=1), flags, stack)
        started.add(engines)
        yield started


def label(stub: Stub, version: str) -> None:
    assert stub.post("/update_weight_version", {"new_version": version}).status == 200


class World(NamedTuple):
    """A bus of the test's own, an orchestrator's voice on it, and the module's engines."""

    server: Embedded
    mind: Orchestrator
    fleet: Fleet

    @property
    def stubs(self) -> list[Stub]:
        return self.fleet.stubs

    def client(self, *, url: str | None = None, **options: Any) -> ReplayClient:
        return ReplayClient(url or self.server.url, job=JOB, **options)

    def assert_reference(self, turn: Turn, length: int = 100) -> None:
        ids, logprobs = self.fleet.reference(length)
        assert turn.token_ids == ids
        assert turn.logprobs == logprobs
        assert turn.finish_reason == "length"
        assert turn.complete


def params(max_tokens: int = 100, **changes: Any) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0, **changes}


def ends(turn: Turn) -> list[tuple[str, End]]:
    return [(attempt.engine, attempt.reason) for attempt in turn.attempts]


async def heard(pieces: Pieces, tokens: int) -> None:
    """Read until so many tokens of the turn are there."""
    async for piece in pieces:
        if piece.start + len(piece.token_ids) >= tokens:
            return


async def rest(pieces: Pieces) -> Turn:
    """Read to the end. The caller gives the deadline."""
    async for _ in pieces:
        pass
    return pieces.turn


# --- engines that play a script ------------------------------------------------------------------------


class Asked(NamedTuple):
    """One request as it came."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


Play = Callable[[web.Request, Asked], Awaitable[web.StreamResponse]]


class Scripted:
    """A server on a port of its own. `asked` are the generations that were asked for, in order."""

    def __init__(self, play: Play) -> None:
        self.port = 0
        self.asked: list[Asked] = []
        self.aborted: list[str] = []
        self._play = play

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(request.path, request.headers.copy(), msgspec.json.decode(await request.read()))
        self.asked.append(asked)
        return await self._play(request, asked)

    async def abort(self, request: web.Request) -> web.StreamResponse:
        self.aborted += msgspec.json.decode(await request.read())["request_ids"]
        return web.json_response({})


@asynccontextmanager
async def scripted(play: Play) -> AsyncIterator[Scripted]:
    engine = Scripted(play)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/inference/v1/generate", engine.generate)
    app.router.add_post("/abort_requests", engine.abort)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.port = int(runner.addresses[0][1])
        yield engine
    finally:
        await runner.cleanup()


def says(content: bytes) -> Play:
    """Answer each request with these bytes of a stream, and end it cleanly."""

    async def play(request: web.Request, _: Asked) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        await response.write(content)
        return response

    return play


def event(**choice: Any) -> bytes:
    """One chunk with one choice."""
    return b"data: " + msgspec.json.encode({"request_id": "r", "choices": [{"index": 0, **choice}]}) + b"\n\n"


def served(digest: str, asked: Asked, *, version: str = LABEL, **more: Any) -> Iterator[bytes]:
    """What the stub's weights give for a greedy request, token by token. `more`: fields of the last chunk."""
    cap = asked.body["sampling_params"]["max_tokens"]
    ids, logprobs = reference(digest, asked.body["token_ids"], cap)
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
        content = {"content": [{"token_id": token, "logprob": logprob, "rank": 1}]}
        last: dict[str, Any] = {}
        if place == cap:
            spans = [{"version": version, "start": 0, "end": cap}]
            last = {"finish_reason": "length", "weight_versions": spans, **more}
        yield event(token_ids=[token], logprobs=content, **last)
    yield b"data: [DONE]\n\n"


def serves(digest: str, **more: Any) -> Play:
    """Answer as the stub's weights would."""

    async def play(request: web.Request, asked: Asked) -> web.StreamResponse:
        return await says(b"".join(served(digest, asked, **more)))(request, asked)

    return play
