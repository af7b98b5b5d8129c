"""Loading weights and proving them. A label is not proof: the digest of the bytes comes first.

Nothing of the engine is touched before the files are hashed and their names and shapes compared. Whatever
goes wrong after that is `touched`, and there is no second try in place.
"""

import logging
from pathlib import Path

import anyio
import msgspec

from relight.agents import snapshot
from relight.agents.adapters.vllm import Client, EngineRefused, EngineUnreachable
from relight.agents.node import canary
from relight.agents.node.config import starts_empty
from relight.agents.node.owned import Owned
from relight.agents.node.shapes import keep_shapes, misfit
from relight.agents.snapshot import Manifest, SnapshotError
from relight.events.bus.clock import monotonic_ms
from relight.events.decisions import LoadWeights, VerifyEngine
from relight.events.facts import Healthy, WeightsFailed, WeightsLoaded
from relight.events.ids import DecisionId
from relight.events.values import Canary, Evidence
from relight.events.version import BASE, Version

log = logging.getLogger(__name__)


_LOADABLE = {"overrides": {"load_config": {"load_format": "auto"}}}
"""An engine that was started with `--load-format dummy` refuses reloads until it is told this."""


PAUSE_S = 5.0
"""Limit of pausing an engine that failed its proof."""


class _Failed(Exception):
    """What WeightsFailed will say."""

    def __init__(self, error: str, *, touched: bool) -> None:
        super().__init__(error)
        self.touched = touched


async def load(owned: Owned, order: LoadWeights) -> None:
    """Do what `order` says; publishes WeightsLoaded or WeightsFailed."""
    began = monotonic_ms()
    try:
        with anyio.fail_after(owned.seconds_until(order.deadline, at_least=0.0)):
            if (owned.record.version, owned.record.digest) != (order.version, order.digest):
                await _load(owned, order)
    except TimeoutError:
        failed = _Failed("the load's deadline passed", touched=owned.record.load is not None)
    except _Failed as error:
        failed = error
    else:
        owned.shared.say(
            WeightsLoaded(
                engine=owned.name,
                incarnation=order.incarnation,
                sync=order.sync,
                version=order.version,
                digest=order.digest,
                seconds=(monotonic_ms() - began) / 1000.0,
                answers=order.id,
            )
        )
        return
    owned.shared.say(load_failed(order, str(failed), touched=failed.touched))
    if failed.touched:
        owned.save(load=None, version=None, digest=None)


def load_failed(order: LoadWeights, error: str, *, touched: bool) -> WeightsFailed:
    """The fact that answers `order`."""
    return WeightsFailed(
        engine=order.engine,
        incarnation=order.incarnation,
        sync=order.sync,
        version=order.version,
        error=error,
        touched=touched,
        answers=order.id,
    )


async def _load(owned: Owned, order: LoadWeights) -> None:
    holds = owned.record.version
    if holds is not None and order.version < holds:
        raise _Failed(f"it holds {holds}; a load never goes back to {order.version}", touched=False)
    folder, manifest = await _checked(owned, order)
    serving = not owned.record.paused
    client = owned.client
    owned.save(load=order, paused=True)
    try:
        if serving:
            await client.pause("keep", within_s=_left(owned, order))
        if starts_empty(owned.config):
            await client.collective_rpc("update_config", _LOADABLE, within_s=_left(owned, order))
        await client.collective_rpc(
            "reload_weights", {"weights_path": str(folder)}, within_s=_left(owned, order)
        )
        await client.set_label(str(order.version), within_s=_left(owned, order))
        if serving and owned.config.kv != "keep":
            await _forget(client, running=owned.config.kv == "recompute", within_s=_left(owned, order))
        if serving:
            await client.resume(within_s=_left(owned, order))
    except (EngineRefused, EngineUnreachable) as error:
        raise _Failed(str(error), touched=True) from error
    owned.save(load=None, version=order.version, digest=order.digest, paused=not serving)
    keep_shapes(owned, manifest)


async def _checked(owned: Owned, order: LoadWeights) -> tuple[Path, Manifest]:
    try:
        folder = snapshot.directory_of(order.uri)
        manifest = await anyio.to_thread.run_sync(snapshot.check, folder, order.digest)
    except SnapshotError as error:
        raise _Failed(str(error), touched=False) from error
    if manifest.version != order.version:
        raise _Failed(f"{folder} holds {manifest.version}, not {order.version}", touched=False)
    if odd := misfit(owned, manifest, folder):
        raise _Failed(f"{folder}: {odd}", touched=False)
    return folder, manifest


def _left(owned: Owned, order: LoadWeights | VerifyEngine) -> float:
    """The limit of one call: a little more than the order's own, which is to say what happened."""
    return owned.seconds_until(order.deadline, at_least=0.0) + 1.0


async def _forget(client: Client, *, running: bool, within_s: float) -> None:
    """Forget cached prefixes. Blocks that running requests hold cannot be: then theirs are recomputed."""
    if await client.reset_prefix_cache(running=running, within_s=within_s):
        return
    if not running and await client.reset_prefix_cache(running=True, within_s=within_s):
        return
    raise EngineRefused("the prefix cache could not be reset: requests still hold blocks of old weights")


async def verify(owned: Owned, order: VerifyEngine) -> None:
    """Do what `order` says; publishes Healthy, or WeightsFailed after pausing again."""
    try:
        with anyio.fail_after(owned.seconds_until(order.deadline, at_least=0.0)):
            seen, evidence = await _verify(owned, order)
    except (TimeoutError, EngineRefused, EngineUnreachable, _Failed) as error:
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
        raise _Failed(f"it was loaded with {record.digest}, not with {order.digest}", touched=True)
    if order.version == BASE and record.version is None:
        await client.set_label(str(BASE), within_s=_left(owned, order))
    label = await client.label(within_s=_left(owned, order))
    if label != str(order.version):
        raise _Failed(f"its label is {label!r}, not {order.version}", touched=True)
    await _forget(client, running=True, within_s=_left(owned, order))
    checksums = await _checksums(owned, within_s=_left(owned, order))
    await client.resume(within_s=_left(owned, order))
    seen = await client.canary(canary.PROMPT, within_s=_left(owned, order))
    seen = msgspec.structs.replace(seen, checksums=checksums)
    if order.reference is not None:
        error = canary.disagreement(seen, order.reference, tolerance=order.tolerance)
        if error:
            raise _Failed(f"canary: {error}", touched=True)
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
