"""Loading weights into a living engine. The digest of the bytes comes first.

Nothing of the engine is touched before the files are hashed and their names and shapes compared. Whatever
goes wrong after that is `touched`, and there is no second try in place.
"""

from pathlib import Path

import anyio

from relight.agents import snapshot
from relight.agents.adapters.vllm import EngineRefused, EngineUnreachable, gave_memory_up
from relight.agents.node import content, evidence, model
from relight.agents.node.config import starts_empty
from relight.agents.node.owned import Owned
from relight.agents.node.shapes import keep_shapes, misfit
from relight.agents.snapshot import Manifest, SnapshotError
from relight.events.bus.clock import monotonic_ms
from relight.events.decisions import LoadWeights
from relight.events.errors import RelightError
from relight.events.facts import WeightsFailed, WeightsLoaded

_LOADABLE = {"overrides": {"load_config": {"load_format": "auto"}}}
"""An engine that was started with `--load-format dummy` refuses reloads until it is told this."""


class _Failed(RelightError):
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
        if failed.touched:
            evidence.begin(owned)
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
    await owned.death_goes_first()
    owned.shared.say(load_failed(order, str(failed), touched=failed.touched))
    if failed.touched:
        owned.save(load=None, version=None, digest=None, uri=None)


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
    if (known := model.known(owned)).reloads is False:
        raise _Failed(f"it is only started on weights, since it reloads wrongly: {known.why}", touched=False)
    folder, manifest = await _checked(owned, order)
    if await _sleeps(owned, order):
        raise _Failed("it sleeps, and has no memory to load into", touched=False)
    serving = not owned.record.paused
    client = owned.client
    try:
        owned.save(first=True, load=order, paused=True)
    except OSError as error:
        raise _Failed(f"the agent's record of it cannot be written: {error}", touched=False) from error
    try:
        if serving:
            await client.pause("keep", within_s=owned.call_s(order.deadline))
        if starts_empty(owned.config):
            await client.collective_rpc("update_config", _LOADABLE, within_s=owned.call_s(order.deadline))
        await client.collective_rpc(
            "reload_weights", {"weights_path": str(folder)}, within_s=owned.call_s(order.deadline)
        )
        if serving and content.is_cheap(owned):  # others are looked at in their proof, before their route
            seen = await content.look(owned, folder, within_s=owned.call_s(order.deadline))
            if seen.error:
                raise _Failed(seen.error, touched=True)
        await client.set_label(str(order.version), within_s=owned.call_s(order.deadline))
        if serving and owned.config.kv != "keep":
            await client.forget(running=owned.config.kv == "recompute", within_s=owned.call_s(order.deadline))
        if serving:
            await client.resume(within_s=owned.call_s(order.deadline))
    except (EngineRefused, EngineUnreachable) as error:
        raise _Failed(str(error), touched=True) from error
    owned.save(load=None, version=order.version, digest=order.digest, uri=order.uri, paused=not serving)
    keep_shapes(owned, manifest)


async def _sleeps(owned: Owned, order: LoadWeights) -> bool:
    try:
        return gave_memory_up(await owned.client.exposition(within_s=owned.call_s(order.deadline)))
    except EngineRefused:  # it has no metrics, and so does not say it
        return False
    except EngineUnreachable as error:
        raise _Failed(str(error), touched=False) from error


async def _checked(owned: Owned, order: LoadWeights) -> tuple[Path, Manifest]:
    try:
        folder = snapshot.directory_of(order.uri)
        manifest = await anyio.to_thread.run_sync(
            snapshot.check, folder, order.digest, abandon_on_cancel=True
        )
    except SnapshotError as error:
        raise _Failed(str(error), touched=False) from error
    if manifest.version != order.version:
        raise _Failed(f"{folder} holds {manifest.version}, not {order.version}", touched=False)
    if odd := misfit(owned, manifest, folder):
        raise _Failed(f"{folder}: {odd}", touched=False)
    return folder, manifest
