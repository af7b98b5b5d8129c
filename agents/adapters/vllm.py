"""A client of vLLM's HTTP API as an agent needs it; imports no vllm. Shapes are those of vLLM 0.32.

Every call has a time limit of its own and raises EngineUnreachable or EngineRefused. Connections are not
kept: one that the server closed in between would look like an engine's death.
"""

import contextlib
import math
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import aiohttp
import anyio
import msgspec

from relight.events.errors import RelightError
from relight.events.values import Canary

CANARY_PATH = "/inference/v1/generate?relight=canary"
"""Access logs tell the agent's own generations from clients' by the query."""

ABORT_S = 0.5
"""For an engine to take back a generation; it need not, it is only told."""

_HITS = "prefix_cache_hits_total"

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""The hash of nothing: packed layers answer with it, and it proves nothing."""

CLAMPED = -9998.0
"""vLLM writes -9999.0 where a logprob is -inf or not a number."""

T = TypeVar("T")


class EngineUnreachable(RelightError):
    """No answer, or none in time."""

    def __init__(self, message: str, *, cause: OSError | None = None) -> None:
        super().__init__(message)
        self.errno = cause.errno if cause else None
        """Where our own machine refused the attempt: EMFILE says nothing of the engine."""


class EngineRefused(RelightError):
    """An answer that is not success, or not what it should be."""


class CanaryAborted(EngineRefused):
    """Somebody aborts what the engine generates, as who pauses it may: that tells nothing of the engine."""


class Counters(NamedTuple):
    """What /metrics tells of work."""

    running: float
    waiting: float
    tokens: float
    """Tokens made and iterations done; only grows."""
    steps: float = 0.0
    """Iterations done, where they are told."""


class _Paused(msgspec.Struct):
    is_paused: bool


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _Load(msgspec.Struct):
    server_load: float


class _Label(msgspec.Struct):
    weight_version: str


class _Version(msgspec.Struct):
    version: str


class _Success(msgspec.Struct):
    success: bool


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


class _Logprob(msgspec.Struct):
    logprob: float


class _TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Content(msgspec.Struct):
    content: list[_TokenLogprob]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Content
    finish_reason: str | None


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[int, _Logprob] | None]


class Client:
    """One engine's API at `url` (`http://HOST:PORT`)."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self.url = url

    async def health(self, *, within_s: float) -> bool:
        """Whether the server believes that its engine lives. True says little."""
        status, _ = await self._send("GET", "/health", within_s=within_s)
        return status == 200

    async def is_paused(self, *, within_s: float) -> bool:
        """Asks the core: an answer shows that its loop turns."""
        return (await self._ask("GET", "/is_paused", _Paused, within_s=within_s)).is_paused

    async def pause(self, mode: Literal["abort", "wait", "keep"], *, within_s: float) -> None:
        await self._ask("POST", f"/pause?mode={mode}", None, within_s=within_s)

    async def resume(self, *, within_s: float) -> None:
        await self._ask("POST", "/resume", None, within_s=within_s)

    async def collective_rpc(self, method: str, kwargs: dict[str, Any], *, within_s: float) -> None:
        """Call a method on every worker."""
        body = {"method": method, "kwargs": kwargs}
        await self._ask("POST", "/collective_rpc", None, body=body, within_s=within_s)

    async def version(self, *, within_s: float) -> str:
        """Of the engine's software."""
        return (await self._ask("GET", "/version", _Version, within_s=within_s)).version

    async def label(self, *, within_s: float) -> str:
        """The version label; `default` until one is set. No proof of content."""
        return (await self._ask("GET", "/weight_info", _Label, within_s=within_s)).weight_version

    async def set_label(self, label: str, *, within_s: float) -> None:
        body = {"new_version": label}
        await self._ask("POST", "/update_weight_version", None, body=body, within_s=within_s)

    async def reset_prefix_cache(self, *, running: bool, within_s: float) -> bool:
        """Forget cached prefixes, those of running requests too if `running`; False where blocks are held."""
        path = f"/reset_prefix_cache?reset_running_requests={str(running).lower()}"
        return (await self._ask("POST", path, _Success, within_s=within_s)).success

    async def forget(self, *, running: bool, within_s: float) -> None:
        """Forget cached prefixes. Blocks that running requests hold cannot be: then theirs are recomputed."""
        if await self.reset_prefix_cache(running=running, within_s=within_s):
            return
        if not running and await self.reset_prefix_cache(running=True, within_s=within_s):
            return
        raise EngineRefused("the prefix cache could not be reset: requests still hold blocks of old weights")

    async def checksums(self, *, within_s: float) -> dict[str, str]:
        """The engine's own sha256 of each tensor, without those of nothing."""
        body = {"action": "checksum"}
        told = await self._ask("POST", "/weight_checker", _Checksums, body=body, within_s=within_s)
        return {name: digest for name, digest in told.checksums.items() if digest != EMPTY_SHA256}

    async def is_sleeping(self, *, within_s: float) -> bool:
        """Whether it gave up its memory until it is woken."""
        return (await self._ask("GET", "/is_sleeping", _Sleeping, within_s=within_s)).is_sleeping

    async def load(self, *, within_s: float) -> float:
        """Requests that its server holds; told without its core and without metrics."""
        return (await self._ask("GET", "/load", _Load, within_s=within_s)).server_load

    async def exposition(self, *, within_s: float) -> bytes:
        """What /metrics says, for `total`."""
        status, body = await self._send("GET", "/metrics", within_s=within_s)
        if status != 200:
            raise EngineRefused(f"GET /metrics: {status}")
        return body

    async def counters(self, *, within_s: float) -> Counters | None:
        """What /metrics says of work; None where it does not say it: unknown, not zero."""
        try:
            told = await self.exposition(within_s=within_s)
        except EngineRefused:
            return None
        running, waiting = total(told, "num_requests_running"), total(told, "num_requests_waiting")
        made, steps = total(told, "generation_tokens_total"), total(told, "iteration_tokens_total_count")
        if running is None or waiting is None or made is None:
            return None
        return Counters(running, waiting, made + (steps or 0.0), steps or 0.0)

    async def reuses_prefix(self, prompt: Sequence[int], *, within_s: float) -> bool:
        """Whether its prefix cache answers for a part of `prompt`, for which one token is generated.

        False where /metrics does not say it. Meaningful while nobody else asks anything.
        """
        before = total(await self.exposition(within_s=within_s), _HITS)
        body = {
            "token_ids": list(prompt),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False},
            "stream": False,
        }
        await self._ask("POST", CANARY_PATH, None, body=body, within_s=within_s)
        after = total(await self.exposition(within_s=within_s), _HITS)
        return before is not None and after is not None and after > before

    async def canary(self, prompt: Sequence[int], *, within_s: float) -> Canary:
        """Score `prompt` and generate one greedy token after it; every logprob is finite.

        A generation that is given up is aborted: an engine that is ill would keep it.
        """
        body = {
            "request_id": f"relight-{uuid.uuid4().hex[:16]}",
            "token_ids": list(prompt),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0,
                                "ignore_eos": True, "detokenize": False},
            "stream": False,
        }  # fmt: skip
        answered = False
        try:
            told = await self._ask("POST", CANARY_PATH, _Generated, body=body, within_s=within_s)
            answered = True
        except EngineRefused:
            answered = True
            raise
        finally:
            if not answered:
                with anyio.CancelScope(shield=True):
                    await self._abort(f"generate-tokens-{body['request_id']}")
        return _canary(prompt, told)

    async def _abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineUnreachable):  # nobody is there: nothing is left of it
            body = {"request_ids": [request_id]}
            await self._send("POST", "/abort_requests", body=body, within_s=ABORT_S)

    async def _ask(
        self, method: str, path: str, kind: type[T] | None, *, body: object = None, within_s: float
    ) -> T:
        status, answer = await self._send(method, path, body=body, within_s=within_s)
        if status != 200:
            raise EngineRefused(f"{method} {path}: {status} {answer[:300].decode(errors='replace')}")
        try:
            return msgspec.json.decode(answer, type=kind) if kind is not None else None  # type: ignore[return-value]
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineRefused(f"{method} {path}: {error}: {answer[:300]!r}") from error

    async def _send(
        self, method: str, path: str, *, body: object = None, within_s: float
    ) -> tuple[int, bytes]:
        try:
            async with self._http.request(
                method,
                self.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=aiohttp.ClientTimeout(total=max(within_s, 0.001)),
                allow_redirects=False,
            ) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise EngineUnreachable(f"{method} {path}: no answer within {within_s:.1f} s") from error
        except aiohttp.ClientOSError as error:
            raise EngineUnreachable(f"{method} {path}: {error}", cause=error) from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{method} {path}: {type(error).__name__} {error}") from error


def session() -> aiohttp.ClientSession:
    """What clients share; closed by the caller."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, limit=0), auto_decompress=False, trust_env=False
    )


def gave_memory_up(exposition: bytes) -> bool:
    """Whether an engine sleeps so deeply that its weights are not on the device; False where it is not told.

    /is_sleeping does not say it: it is true of every engine that is paused.
    """
    return (
        re.search(rb'^vllm:engine_sleep_state\{[^}]*"awake"[^}]*\} 0(?:\.0)?$', exposition, re.MULTILINE)
        is not None
    )


def total(exposition: bytes, name: str) -> float | None:
    """The value of one of vLLM's metrics over all its labels; a share (`…_perc`) is the largest one.

    None where it is not told.
    """
    pattern = rb"^vllm:" + name.encode() + rb"(?:\{[^}]*\})? (\S+)"
    values = [float(value) for value in re.findall(pattern, exposition, re.MULTILINE)]
    if not values:
        return None
    return max(values) if name.endswith("_perc") else sum(values)


def _canary(prompt: Sequence[int], told: _Generated) -> Canary:
    if len(told.choices) == 1 and told.choices[0].finish_reason == "abort":
        raise CanaryAborted("canary: it was aborted")
    if len(told.choices) != 1 or len(told.choices[0].token_ids) != 1:
        raise EngineRefused(f"canary: asked for one token, got {[c.token_ids for c in told.choices]}")
    choice = told.choices[0]
    if choice.finish_reason not in ("length", "stop"):
        raise EngineRefused(f"canary: finish reason {choice.finish_reason!r}")
    if len(told.prompt_logprobs) != len(prompt) or len(choice.logprobs.content) != 1:
        raise EngineRefused(f"canary: {len(told.prompt_logprobs)} logprobs for {len(prompt)} tokens")
    logprobs: list[float] = []
    for token, scores in zip(prompt[1:], told.prompt_logprobs[1:], strict=True):
        if scores is None or token not in scores:
            raise EngineRefused(f"canary: no logprob for token {token}")
        logprobs.append(scores[token].logprob)
    logprobs.append(choice.logprobs.content[0].logprob)
    if not all(math.isfinite(value) and CLAMPED < value <= 1e-3 for value in logprobs):
        raise EngineRefused(f"canary: logprobs that are none: {logprobs}")
    return Canary(tokens=(*prompt, choice.token_ids[0]), logprobs=tuple(logprobs))
