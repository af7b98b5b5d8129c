"""Proving the weights of an engine before its route: label, forgotten caches, checksums, canary.

A label is not proof, and the canary shows garbage, not one missed step: the version rests on the digest of
the bytes that were loaded. An engine that is not proven is paused again and makes no token for anybody.
"""

import logging
from pathlib import Path

import anyio
import msgspec

from relight.agents import snapshot
from relight.agents.adapters.vllm import EngineRefused, EngineUnreachable
from relight.agents.node import canary, content
from relight.agents.node.evidence import begin as take_evidence
from relight.agents.node.owned import Owned
from relight.agents.node.record import RANDOM
from relight.events.canary import disagreement, is_same
from relight.events.decisions import VerifyEngine
from relight.events.errors import RelightError
from relight.events.facts import Healthy, WeightsFailed
from relight.events.ids import DecisionId
from relight.events.values import Canary, Evidence
from relight.events.version import BASE, Version

log = logging.getLogger(__name__)

PREFIX = canary.PROMPT * 3
"""Long enough for whole blocks of any prefix cache but the coarsest, and asked at each proof."""
PAUSE_S = 5.0
"""Limit of pausing an engine that failed its proof."""


class _Unproven(RelightError):
    """What WeightsFailed will say."""


async def verify(owned: Owned, order: VerifyEngine) -> None:
    """Do what `order` says; publishes Healthy, or WeightsFailed after pausing again."""
    try:
        with anyio.fail_after(owned.seconds_until(order.deadline, at_least=0.0)):
            fact = await _verify(owned, order)
    except (TimeoutError, EngineRefused, EngineUnreachable, _Unproven) as error:
        if isinstance(error, TimeoutError):
            take_evidence(owned)
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
    owned.shared.say(fact)


def healthy(  # noqa: PLR0913 -- a fact's fields
    owned: Owned,
    version: Version,
    *,
    seen: Canary | None,
    evidence: Evidence,
    answers: DecisionId,
    unproven: str | None = None,
    moved: bool = True,
    labelled: bool = True,
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
        unproven=unproven,
        moved=moved,
        labelled=labelled,
        answers=answers,
    )


async def _verify(owned: Owned, order: VerifyEngine) -> Healthy:
    record, client = owned.record, owned.client
    if record.version == order.version and record.digest and order.digest not in (None, record.digest):
        raise _Unproven(f"it was loaded with {record.digest}, not with {order.digest}")
    if order.version == BASE and record.version is None:
        await client.set_label(str(BASE), within_s=owned.call_s(order.deadline))
    label = await client.label(within_s=owned.call_s(order.deadline))
    if label != str(order.version):
        raise _Unproven(f"its label is {label!r}, not {order.version}")
    await client.forget(running=True, within_s=owned.call_s(order.deadline))
    ours = record.version == order.version or (order.version == BASE and record.version is None)
    folder = content.folder_of(owned) if ours else None
    held = await content.look(owned, folder, within_s=owned.call_s(order.deadline))
    if held.error:
        raise _Unproven(held.error)
    await client.resume(within_s=owned.call_s(order.deadline))
    if await client.reuses_prefix(PREFIX, within_s=owned.call_s(order.deadline)):
        raise _Unproven("its prefix cache answers with keys and values of before it was reset")
    seen = await owned.canary(within_s=owned.call_s(order.deadline))
    seen = msgspec.structs.replace(seen, checksums=held.checksums)
    if order.reference is not None:
        error = disagreement(seen, order.reference, tolerance=order.tolerance)
        if error:
            raise _Unproven(f"canary: {error}")
    unproven, moved = None, True
    if not held.compared and order.reference is None and order.version != BASE:
        unproven = "no checksum of it is real and no peer's canary is known at this version"
        moved = await _moved(owned, seen, folder, pushed=not ours)
        if not moved:
            unproven = f"it computes exactly what it computed before, and {unproven}"
    owned.save(
        paused=False,
        version=order.version,
        digest=order.digest or record.digest,
        uri=record.uri if ours else None,
        canary=seen,
        canary_of=content.origin_of(owned) if ours else None,
    )
    evidence: Evidence = {
        "label": label,
        "checksums": held.checksums is not None,
        "tensors_compared": held.compared,
        "reference": order.reference is not None,
    }
    return healthy(
        owned, order.version, seen=seen, evidence=evidence, answers=order.id, unproven=unproven, moved=moved
    )


async def _moved(owned: Owned, seen: Canary, folder: Path | None, *, pushed: bool) -> bool:
    """Where nothing else tells: other weights compute something else, in the last bits at least. Whether
    these do, or are the same as before; raises _Unproven where they are known to be others and do not.

    An update so small that no bit of the canary moves is taken for none; the engine is then started on it.
    """
    last, before = owned.record.canary, owned.record.canary_of
    if last is None or not is_same(last, seen):
        return True
    if before == RANDOM:
        raise _Unproven("it computes exactly what it computed with the random weights it was started with")
    if before is None or folder is None:
        return folder is None and not pushed  # those of the same version again
    if before == str(folder):
        return True
    if await anyio.to_thread.run_sync(snapshot.differ, Path(before), folder, abandon_on_cancel=True):
        raise _Unproven(f"it computes exactly what it computed with the weights in {before}")
    return False


async def _pause_again(owned: Owned) -> None:
    """An engine that is not proven makes no token for anybody."""
    owned.save(paused=True)
    try:
        await owned.client.pause("abort", within_s=PAUSE_S)
    except (EngineRefused, EngineUnreachable) as error:
        log.warning("an unproven engine could not be paused engine=%s error=%s", owned.name, error)
