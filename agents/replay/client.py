"""`ReplayClient`: generate on whatever engine of a job serves, and finish what a death interrupts."""

import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import anyio

from relight.agents.replay import metrics
from relight.agents.replay.dispatch import Dispatch
from relight.agents.replay.generation import Generation
from relight.agents.replay.ledger import Ledger, Policy
from relight.agents.replay.limits import Call, Limits
from relight.agents.replay.params import Params
from relight.agents.replay.seam import Decodes
from relight.agents.replay.speech import Speech
from relight.agents.replay.stream import CONNECT_S
from relight.agents.replay.tally import Numbers
from relight.agents.replay.turn import Piece, ReplayError, Turn
from relight.events.bus.client import open_bus
from relight.events.bus.follow import reached
from relight.events.errors import BusUnavailable, UsageError
from relight.events.ids import Source, job_name

BUS_S = 3.0
"""How long the start waits for a bus that can serve: one that is being started beside it. Who wants to wait
for one that is away starts again."""

SYNC_S = 15.0
"""How long it then waits for the routes: a start among hundreds on one machine is slow."""

KEEP_ALIVE_S = 2.0
"""Idle connections are closed after that: before the engine does it (vLLM: 5 s), or a request that meets the
closing would look like an engine's death."""


class ReplayClient:
    """Use as `async with`. Any number of turns at once, from tasks of one event loop.

    `url`: the bus; none for RELIGHT_BUS_URL. `mode`: `continue` goes on after the kept tokens where that is
    exact, `restart` always replays from the prompt. `versions`: `mixed` records which token came from which
    weights, `same` replays a turn whose weights changed. `routing`: `replay` forbids continuing, so that
    routing records are of one pass; `recompute` takes those of the last attempt. `recovery_timeout_s` bounds
    each wait for a route or for tokens to come again; `max_engine_failures` the failures one turn may meet:
    with the last of them it is given up, and where three engines have died with it in flight, its error is a
    PoisonRequestError. A larger number says that engines die of other things.
    `idle_timeout_s`: an engine that sends nothing for that long has failed; none leaves that to the fence.
    `check_seam`: before kept tokens are continued at the version they were sampled by, the engine scores them
    itself; where it is further from a recorded logprob than so many nats, the turn is replayed instead.
    `math.inf` only measures. `tokenizer`: finds stop strings across the seam, and tells the end-of-sequence
    token.
    """

    def __init__(  # noqa: PLR0913 - the public signature
        self,
        url: str | None = None,
        *,
        job: str,
        mode: Literal["continue", "restart"] = "continue",
        versions: Literal["mixed", "same"] = "mixed",
        routing: Literal["recompute", "replay"] = "recompute",
        recovery_timeout_s: float = 300.0,
        max_engine_failures: int = 3,
        idle_timeout_s: float | None = 300.0,
        check_seam: float | None = None,
        tokenizer: Decodes | None = None,
    ) -> None:
        """No I/O; raises UsageError for wrong arguments."""
        found = url or os.environ.get("RELIGHT_BUS_URL")
        if not found:
            raise UsageError("no bus: give its URL or set RELIGHT_BUS_URL")
        _one_of("mode", mode, ("continue", "restart"))
        _one_of("versions", versions, ("mixed", "same"))
        _one_of("routing", routing, ("recompute", "replay"))
        if max_engine_failures < 1:
            raise UsageError(f"max_engine_failures must be at least 1, not {max_engine_failures}")
        if check_seam is not None and not check_seam >= 0.0:
            raise UsageError(f"check_seam is a largest difference of at least 0, not {check_seam}")
        self._url = found
        self._job = job_name(job)
        self._policy = Policy(mode == "restart", versions == "same", routing == "recompute")
        self._limits = Limits(recovery_timeout_s, max_engine_failures, idle_timeout_s, None, check_seam)
        self._numbers = Numbers()
        self._under_way: set[Generation] = set()
        self._tokenizer = tokenizer
        self._eos: int | None = getattr(tokenizer, "eos_token_id", None)
        self._source = Source(f"client/{secrets.token_hex(4)}")
        self._open: tuple[AsyncExitStack, Dispatch, aiohttp.ClientSession] | None = None

    async def __aenter__(self) -> Self:
        """Reach the bus and read the routes; raises BusUnavailable or UsageError."""
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(open_bus(self._url, reached=False))
            job = bus.job(self._job)
            await reached(job, within_s=BUS_S)
            await bus.check()
            http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                )
            )
            dispatch = Dispatch(job, http, source=self._source)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(dispatch.run, tasks)
            with anyio.move_on_after(SYNC_S):
                await dispatch.synced()
                self._open = (stack.pop_all(), dispatch, http)
                return self
        raise BusUnavailable(
            f"job {self._job}: its routes could not be read within {SYNC_S:g} s, though the bus answered"
            " before: it went away, or this machine has too much to do; start again"
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._open is not None
        stack, _, _ = self._open
        self._open = None
        # The caller's own error is none of the task group's, which would wrap it in a group.
        await stack.aclose()

    async def generate(  # noqa: PLR0913 - the public signature
        self,
        token_ids: Sequence[int],
        sampling_params: Params,
        *,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Turn:
        """The whole turn; raises ReplayError, which has its partial.

        `session` keeps turns on one engine while it serves. `headers` and `extra` (further fields of the
        body, as `priority` or `cache_salt`) are passed on with each attempt. `timeout_s` bounds the turn.
        """
        call = _call(session, headers, extra)
        with self._turn(token_ids, sampling_params, call, timeout_s) as generation:
            return await _whole(generation)

    async def group(  # noqa: PLR0913 - `generate`'s own, and how many
        self,
        token_ids: Sequence[int],
        sampling_params: Params,
        *,
        n: int,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Turn | ReplayError]:
        """A group of `n` samples of one prompt as `n` turns at once: each is continued by itself, where one
        request for n choices would have to be replayed whole. The outcome of each, in order.

        A seed is counted up from sample to sample, as vLLM does. The samples share the session, or one of
        their own, so that one engine computes the prompt.
        """
        call = _call(session or f"group-{secrets.token_hex(8)}", headers, extra)
        outcomes: dict[int, Turn | ReplayError] = {}

        async def sample(number: int) -> None:
            own = call._replace(request_id=f"{call.request_id}-{number}")
            params = {**sampling_params, "n": 1}
            if params.get("seed") is not None:
                params["seed"] += number
            try:
                with self._turn(token_ids, params, own, timeout_s) as generation:
                    outcomes[number] = await _whole(generation)
            except ReplayError as error:
                outcomes[number] = error

        async with anyio.create_task_group() as tasks:
            for number in range(n):
                tasks.start_soon(sample, number)
        return [outcomes[number] for number in range(n)]

    @asynccontextmanager
    async def stream(  # noqa: PLR0913 - the public signature
        self,
        token_ids: Sequence[int],
        sampling_params: Params,
        *,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator["Pieces"]:
        """As `generate`, piece by piece as tokens come. Leaving it early aborts the turn."""
        call = _call(session, headers, extra)
        with self._turn(token_ids, sampling_params, call, timeout_s) as generation:
            yield Pieces(generation)

    def abort(self, request_id: str | None = None) -> int:
        """End the turns under way of that `X-Request-Id`, or all: their engines are told, and their calls
        return what they have, not `complete`. Answers how many there were.
        """
        named = [each for each in self._under_way if request_id in (None, each.request_id)]
        for generation in named:
            generation.abort()
        return len(named)

    def numbers(self, *, step: int | None = None) -> dict[str, Any]:
        """What replays cost and did to the samples of the turns that ended since the last call, under the
        caller's `step`: counts of turns, tokens and replays, the share of mixed versions, and the lengths of
        interrupted samples beside those of the others.
        """
        return {"step": step, **self._numbers.take()}

    def metrics(self) -> str:
        """The same over the client's whole life, in Prometheus' text format."""
        return metrics.text(self._numbers.ever)

    @property
    def addresses(self) -> list[str]:
        """Where calls may go at the moment."""
        return [route.address for route in self._opened()[0].routes if not route.suspected]

    @property
    def http(self) -> aiohttp.ClientSession:
        """The connections to engines."""
        return self._opened()[1]

    def _opened(self) -> tuple[Dispatch, aiohttp.ClientSession]:
        if self._open is None:
            raise UsageError(
                "the client is not open: use it as `async with relight.ReplayClient(…) as client`"
            )
        return self._open[1], self._open[2]

    @contextmanager
    def _turn(
        self, token_ids: Sequence[int], sampling_params: Params, call: Call, timeout_s: float | None
    ) -> Generator[Generation]:
        """A turn for the length of the block; at its end nothing of it is left, and it is counted."""
        dispatch, http = self._opened()
        ledger = Ledger(
            token_ids, sampling_params, policy=self._policy, tokenizer=self._tokenizer, eos=self._eos
        )
        with self._counted(
            Generation(dispatch, http, ledger, call, self._limits._replace(timeout_s=timeout_s))
        ) as generation:
            yield generation

    @contextmanager
    def speaking(
        self,
        speech: Speech,
        ledger: Ledger,
        *,
        session: str | None,
        headers: Mapping[str, str],
        extra: Mapping[str, Any] | None = None,
    ) -> Generator[Generation]:
        """A turn in another speech than that of tokens, with the ledger that understands it."""
        dispatch, http = self._opened()
        call = _call(session, headers, extra)
        with self._counted(
            Generation(dispatch, http, ledger, call, self._limits, speech=speech)
        ) as generation:
            yield generation

    @contextmanager
    def _counted(self, generation: Generation) -> Generator[Generation]:
        self._under_way.add(generation)
        try:
            yield generation
        finally:
            self._under_way.discard(generation)
            generation.close()
            self._numbers.add(generation.account())


class Pieces:
    """The pieces of one turn, in order. `turn` is what there is so far, and the whole at the end."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._ready: deque[Piece] = deque()

    @property
    def turn(self) -> Turn:
        return self._generation.turn()

    def close(self) -> None:
        """Abort what is under way; `turn` then says so too."""
        self._generation.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while not self._ready:
            if self._generation.done:
                raise StopAsyncIteration
            if (brought := await self._generation.step()) is not None:
                self._ready.extend(brought.pieces())
        return self._ready.popleft()


async def _whole(generation: Generation) -> Turn:
    while not generation.done:
        await generation.step()
    return generation.turn()


def _call(session: str | None, headers: Mapping[str, str] | None, extra: Mapping[str, Any] | None) -> Call:
    """The caller's X-Request-Id becomes the turn's; each attempt's own is made from it."""
    passed = dict(headers or {})
    given = [passed.pop(name) for name in list(passed) if name.lower() == "x-request-id"]
    return Call(given[0] if given else secrets.token_hex(8), session, passed, extra or {})


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
