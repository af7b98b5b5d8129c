"""Looking at an engine because somebody asked: it is well, or it is dead, and busy is not dead."""

from collections.abc import Callable
from typing import NamedTuple

import anyio

from relight.agents.adapters.vllm import CanaryAborted, Counters, EngineRefused, EngineUnreachable
from relight.agents.node.owned import Owned
from relight.agents.node.verify import healthy
from relight.events.bus.clock import monotonic_ms
from relight.events.decisions import ProbeEngine
from relight.events.values import Canary, Evidence
from relight.events.version import BASE, Version

CALL_S = 2.0
"""Limit of one look at the server process alone, which answers in milliseconds."""
REPLY_S = 7.0
"""Of the time that an order gives: kept for what is asked behind the look, and for the answer's own way. An
order that gives less is halved."""


class Stalled(NamedTuple):
    """It neither answers nor makes progress."""

    detail: str
    silent_ms: float
    """How long it was asked."""


async def probe(owned: Owned, order: ProbeEngine, *, lent: Callable[[], bool]) -> Stalled | None:
    """Do what `order` says: publishes Healthy, or returns why the engine is dead.

    `lent`: whether a trainer may write into it at this moment.
    """
    began, before = monotonic_ms(), await _counters(owned)
    left_s = owned.seconds_until(order.deadline, at_least=0.1)
    evidence: Evidence = {"canary": True}
    seen: Canary | None = None
    try:
        with anyio.fail_after(max(left_s - REPLY_S, left_s / 2.0)):
            seen = await _look(owned)
    except (TimeoutError, EngineUnreachable, CanaryAborted) as error:
        excuse = await _excuse(owned, before, aborted=isinstance(error, CanaryAborted), lent=lent())
        if excuse is None:
            text = f"probe: {error or 'no answer before its deadline'}, and no token was made"
            return Stalled(text, monotonic_ms() - began)
        evidence = {"canary": False, **excuse}
    except EngineRefused as error:
        return Stalled(f"probe: {error}", monotonic_ms() - began)
    label = await _label(owned)
    version = label or owned.record.version or BASE  # a push moves the label alone
    fact = healthy(owned, version, seen=seen, evidence=evidence, answers=order.id, labelled=label is not None)
    owned.shared.say(fact)
    return None


async def _excuse(owned: Owned, before: Counters | None, *, aborted: bool, lent: bool) -> Evidence | None:
    """Why an engine that gave no canary is not dead; None where nothing speaks for it."""
    if aborted:
        return {"aborted": True}
    if lent:
        return {"lent": True}
    after = await _counters(owned)
    if before is not None and after is not None and after.tokens > before.tokens:
        return {"tokens": after.tokens - before.tokens, "running": after.running}
    if await _is_paused(owned):  # since it was asked: the next weights are written into it
        return {"paused": True}
    if owned.compiling.goes_on(owned.tree, now=monotonic_ms() / 1000.0, gap_s=owned.config.stall_s):
        return {"compiling": True}
    return None


async def _look(owned: Owned) -> Canary | None:
    """The canary; none while the engine is paused, when an answer of its core must do."""
    client = owned.client
    if not await client.health(within_s=CALL_S):
        raise EngineRefused("GET /health: not 200: the server knows that its core is dead")
    if await client.is_paused(within_s=3600.0):
        return None
    return await owned.canary(within_s=3600.0)


async def _is_paused(owned: Owned) -> bool:
    try:
        return await owned.client.is_paused(within_s=CALL_S)
    except (EngineUnreachable, EngineRefused):
        return False


async def _counters(owned: Owned) -> Counters | None:
    try:
        return await owned.client.counters(within_s=CALL_S)
    except (EngineUnreachable, EngineRefused):
        return None


async def _label(owned: Owned) -> Version | None:
    try:
        return Version.parse(await owned.client.label(within_s=CALL_S))
    except (EngineUnreachable, EngineRefused, ValueError):
        return None
