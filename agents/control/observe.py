"""What can be seen of an engine over its own HTTP, and what cannot, with the reason.

Nothing is guessed: a counter that /metrics does not tell is none, not 0; an engine that cannot be reached
from here is unreachable, not dead. Only its node's agent knows of its death, and the job's state says so.
"""

from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
import anyio
import msgspec

from relight.agents.adapters.vllm import Client, EngineRefused, EngineUnreachable, total
from relight.agents.node import proc
from relight.agents.node.proc import Liveness
from relight.events.ids import EngineName
from relight.events.schema import EngineState
from relight.events.values import Phase
from relight.events.version import Version

T = TypeVar("T")

State = Literal["healthy", "paused", "asleep", "silent", "dead", "absent", "unreachable", "unknown"]
_LOOPBACK = ("127.", "::1", "localhost")


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is."""

    engine: EngineName
    incarnation: int
    phase: Phase
    """Where the orchestrator has it."""
    state: State
    """`healthy`: its core answers. `silent`: its server answers and its core does not. `dead`: its server
    says that its core is dead. `absent`: the slot is not filled. `unreachable`: nothing can be said from
    here. `unknown`: its server is up and its core cannot be asked (vLLM without VLLM_SERVER_DEV_MODE)."""
    detail: str = ""
    took_ms: float | None = None
    """That its core took to answer."""

    @property
    def ok(self) -> bool:
        """Whether it would generate now."""
        return self.state == "healthy"


class Scheduler(msgspec.Struct, frozen=True, kw_only=True):
    """What its scheduler does; none where that cannot be had."""

    running: float | None = None
    waiting: float | None = None
    in_flight: float | None = None
    """Requests that its server holds. 0 is none here: vLLM tells it too where it does not count them."""
    paused: bool | None = None
    asleep: bool | None = None
    iterations: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """Its cache of keys and values; none where that cannot be had."""

    used: float | None = None
    """From 0 to 1."""
    prefix_queries: float | None = None
    """Tokens that were looked up in the prefix cache."""
    prefix_hits: float | None = None
    """Tokens that were found there."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does at one moment, as the job's state and the engine itself tell it."""

    engine: EngineName
    incarnation: int
    phase: Phase
    address: str | None
    version: Version | None
    """Of the weights, as they are proven or in proof."""
    label: str | None = None
    """Of the weights, as the engine itself says. No proof of content."""
    routed: bool
    state: State
    scheduler: Scheduler = Scheduler()
    kv_cache: KvCache = KvCache()
    missing: tuple[str, ...] = ()
    """What could not be had, each with its reason."""


METRICS = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "iterations": "iteration_tokens_total_count",
    "preemptions": "num_preemptions_total",
    "prompt_tokens": "prompt_tokens_total",
    "generated_tokens": "generation_tokens_total",
}
KV_METRICS = {
    "used": "kv_cache_usage_perc",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
}


async def health(
    http: aiohttp.ClientSession, name: EngineName, state: EngineState, *, deadline: float
) -> Health:
    """One look; `deadline` in the event loop's time."""
    seen, detail, took_ms = await _look(_client(http, state), state, deadline)
    return Health(
        engine=name,
        incarnation=state.incarnation,
        phase=state.phase,
        state=seen,
        detail=detail,
        took_ms=took_ms,
    )


def _client(http: aiohttp.ClientSession, state: EngineState) -> Client | None:
    return Client(http, state.address) if state.address is not None else None


async def _look(
    client: Client | None, state: EngineState, deadline: float
) -> tuple[State, str, float | None]:
    if client is None:
        return "absent", f"incarnation {state.incarnation} is {state.phase} and has no address", None
    if why := _elsewhere(client.url, state):
        return "unreachable", why, None
    try:
        if not await client.health(within_s=_left(deadline) / 2):
            return "dead", "GET /health: its server knows that its core is dead", None
    except EngineUnreachable as error:
        return "unreachable", str(error), None
    began = anyio.current_time()
    try:
        paused = await client.is_paused(within_s=_left(deadline))
    except EngineUnreachable as error:
        return "silent", str(error), None
    except EngineRefused as error:
        return "unknown", str(error), None
    took_ms = (anyio.current_time() - began) * 1000.0
    if paused:
        asleep = await _asleep(client, deadline)
        return ("asleep" if asleep else "paused"), "", took_ms
    return "healthy", "", took_ms


async def _asleep(client: Client, deadline: float) -> bool | None:
    try:
        return await client.is_sleeping(within_s=_left(deadline))
    except (EngineRefused, EngineUnreachable):
        return None


def _elsewhere(url: str, state: EngineState) -> str | None:
    """Why a loopback address of another machine must not be called: who answers there is somebody else."""
    host = urlsplit(url).hostname or ""
    if not host.startswith(_LOOPBACK) or not state.processes:
        return None
    if any(proc.liveness(process) is Liveness.ALIVE for process in state.processes):
        return None
    return f"{url} is the loopback of node {state.node}, and none of its processes lives on this machine"


async def snapshot(
    http: aiohttp.ClientSession, name: EngineName, state: EngineState, *, deadline: float
) -> EngineSnapshot:
    """All that can be had by then; `deadline` in the event loop's time."""
    client = _client(http, state)
    missing: list[str] = []
    whole = EngineSnapshot(
        engine=name,
        incarnation=state.incarnation,
        phase=state.phase,
        address=state.address,
        version=state.version,
        routed=state.route is not None,
        state="absent",
    )
    # Half of the time is the health check's, which a frozen core uses up; what its server tells follows.
    half = anyio.current_time() + _left(deadline) / 2
    seen, detail, _ = await _look(client, state, half)
    if client is None or seen in ("absent", "unreachable"):
        return msgspec.structs.replace(whole, state=seen, missing=(f"everything: {detail}",))

    async def had(what: str, call: Callable[[], Awaitable[T]]) -> T | None:
        try:
            return await call()
        except (EngineRefused, EngineUnreachable) as error:
            missing.append(f"{what}: {error}")
            return None

    async def counted() -> tuple[dict[str, float | None], dict[str, float | None]]:
        told = await client.exposition(within_s=_left(deadline) / 2)
        return _counted(told, METRICS, missing), _counted(told, KV_METRICS, missing)

    scheduler, kv_cache = await had("metrics", counted) or ({}, {})
    in_flight = await had("in_flight", lambda: client.load(within_s=_left(deadline) / 2))
    if in_flight == 0:
        missing.append("in_flight: /load tells 0, as it does without --enable-server-load-tracking")
        in_flight = None
    if seen == "silent":
        missing.append(f"paused, asleep, label: {detail}")
        paused = asleep = label = None
    else:
        paused = await had("paused", lambda: client.is_paused(within_s=_left(deadline) / 2))
        asleep = await had("asleep", lambda: client.is_sleeping(within_s=_left(deadline) / 2))
        label = await had("label", lambda: client.label(within_s=_left(deadline) / 2))
    return msgspec.structs.replace(
        whole,
        state=seen,
        label=label,
        scheduler=Scheduler(in_flight=in_flight, paused=paused, asleep=asleep, **scheduler),
        kv_cache=KvCache(**kv_cache),
        missing=tuple(missing),
    )


def _counted(exposition: bytes, names: dict[str, str], missing: list[str]) -> dict[str, float | None]:
    found = {field: total(exposition, metric) for field, metric in names.items()}
    missing += [
        f"{field}: /metrics does not tell vllm:{names[field]}" for field in found if found[field] is None
    ]
    return found


def _left(deadline: float) -> float:
    return max(deadline - anyio.current_time(), 0.01)
