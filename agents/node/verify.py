"""Proving the weights of an engine before its route: label, forgotten caches, checksums, canary.

A label is not proof, and the canary shows garbage, not one missed step: the version rests on the digest of
the bytes that were loaded. An engine that is not proven is paused again and makes no token for anybody.
"""

import logging

import anyio
import msgspec

from relight.agents.adapters.vllm import EngineRefused, EngineUnreachable
from relight.agents.node import canary
from relight.agents.node.owned import Owned
from relight.events.decisions import VerifyEngine
from relight.events.errors import RelightError
from relight.events.facts import Healthy, WeightsFailed
from relight.events.ids import DecisionId
from relight.events.values import Canary, Evidence
from relight.events.version import BASE, Version

log = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Limit of pausing an engine that failed its proof."""


class _Unproven(RelightError):
    """What WeightsFailed will say."""


async def verify(owned: Owned, order: VerifyEngine) -> None:
    """Do what `order` says; publishes Healthy, or WeightsFailed after pausing again."""
    try:
        with anyio.fail_after(owned.seconds_until(order.deadline, at_least=0.0)):
            seen, evidence = await _verify(owned, order)
    except (TimeoutError, EngineRefused, EngineUnreachable, _Unproven) as error:
        await owned.death_goes_first()
        await _pause_again(owned)
        text = str(error) or "the proof's deadline passed"
        owned.shared.say(
            WeightsFailed(
                engine=owned.name,
                incarnation=order.incarnation,
                version=order.version,
                error=text,
                touched=True,
                answers=order.id,
            )
        )
        return
    owned.shared.say(healthy(owned, order.version, seen=seen, evidence=evidence, answers=order.id))


def healthy(
    owned: Owned, version: Version, *, seen: Canary | None, evidence: Evidence, answers: DecisionId
) -> Healthy:
    """The fact that answers a VerifyEngine or a ProbeEngine."""
    assert owned.record.address is not None
    return Healthy(
        engine=owned.name,
        incarnation=owned.record.incarnation,
        address=owned.record.address,
        version=version,
        canary=seen,
        evidence=evidence,
        answers=answers,
    )


async def _verify(owned: Owned, order: VerifyEngine) -> tuple[Canary, Evidence]:
    record, client = owned.record, owned.client
    if record.version == order.version and record.digest and order.digest not in (None, record.digest):
        raise _Unproven(f"it was loaded with {record.digest}, not with {order.digest}")
    if order.version == BASE and record.version is None:
        await client.set_label(str(BASE), within_s=owned.call_s(order.deadline))
    label = await client.label(within_s=owned.call_s(order.deadline))
    if label != str(order.version):
        raise _Unproven(f"its label is {label!r}, not {order.version}")
    await client.forget(running=True, within_s=owned.call_s(order.deadline))
    checksums = await _checksums(owned, within_s=owned.call_s(order.deadline))
    await client.resume(within_s=owned.call_s(order.deadline))
    seen = await client.canary(canary.PROMPT, within_s=owned.call_s(order.deadline))
    seen = msgspec.structs.replace(seen, checksums=checksums)
    if order.reference is not None:
        error = canary.disagreement(seen, order.reference, tolerance=order.tolerance)
        if error:
            raise _Unproven(f"canary: {error}")
    owned.save(paused=False, version=order.version, digest=order.digest or record.digest)
    return seen, {
        "label": label,
        "checksums": checksums is not None,
        "reference": order.reference is not None,
    }


async def _checksums(owned: Owned, *, within_s: float) -> str | None:
    """One digest over the engine's own checksums; evidence, so an engine without them is none the worse."""
    if not owned.config.checksums:
        return None
    try:
        return canary.combined(await owned.client.checksums(within_s=within_s))
    except EngineRefused as error:
        log.info("the engine gives no checksums engine=%s error=%s", owned.name, error)
        return None


async def _pause_again(owned: Owned) -> None:
    """An engine that is not proven makes no token for anybody."""
    owned.save(paused=True)
    try:
        await owned.client.pause("abort", within_s=PAUSE_S)
    except (EngineRefused, EngineUnreachable) as error:
        log.warning("an unproven engine could not be paused engine=%s error=%s", owned.name, error)
