"""The reload's self-test: whether an engine that reloads weights computes what they say.

vLLM reloads some models wrongly and says nothing (tied embeddings and MoE on the CPU). So it is tried once
for each model, vLLM and command, before such an engine ever serves: the same model with its hidden dimension
renumbered is loaded, which must change nothing, and then its own weights again. Where that fails the engine
is only ever started on weights.
"""

import logging
import shutil
from pathlib import Path

import anyio
import msgspec

from relight.agents.adapters.vllm import EngineRefused, EngineUnreachable
from relight.agents.node import model, relabel
from relight.agents.node.config import base_model, starts_empty
from relight.agents.node.errors import StartFailure
from relight.agents.node.model import Model
from relight.agents.node.owned import Owned
from relight.agents.node.shapes import forget_shapes
from relight.agents.snapshot import SnapshotError
from relight.events.bus.clock import monotonic_ms
from relight.events.canary import disagreement
from relight.events.values import Canary

log = logging.getLogger(__name__)

RETURNS = 0.05
"""Nats by which the canary may differ once its own weights are back: kernels repeat themselves."""
SAME = 0.25
"""Nats by which it may differ in the renumbered model, whose sums have another order: two numberings that are
mixed move it by several."""
SPARE_BYTES = 1 << 30
"""Left free on the disk of the state directory."""
CALL_S = 30.0
RELOAD_S = 600.0
"""Longest reload; the start's own deadline lies above it or ends it."""


async def learn(owned: Owned, folder: Path | None) -> bool | None:
    """Learn what is not known yet of an engine that is up and paused, and leave it so; whether it reloads.

    `folder`: of the weights it was started on, where they are in one. Raises StartFailure with the cause
    `reload` where the test has spoilt its weights: it is to be started once more.
    """
    identity = model.identity(owned, await _version(owned))
    last = model.known(owned)
    if last.of == identity and (last.reloads is not None or not last.tries):
        return last.reloads
    if last.of != identity:
        forget_shapes(owned)
    found = Model(of=identity, tries=last.tries if last.of == identity else 0)
    if not starts_empty(owned.config):
        folder = folder or base_model(owned.config)
        found = await _content(owned, found, folder)
        found, spoilt = await _reloaded(owned, found, folder)
        if spoilt:
            model.keep(owned, found)
            raise StartFailure("reload", found.why)
    model.keep(owned, found)
    return found.reloads


async def _version(owned: Owned) -> str:
    try:
        return await owned.client.version(within_s=CALL_S)
    except (EngineRefused, EngineUnreachable) as error:
        log.info("the engine does not tell its version engine=%s error=%s", owned.name, error)
        return ""


async def _content(owned: Owned, found: Model, folder: Path | None) -> Model:
    """With what its own checksums prove."""
    if not owned.config.checksums or folder is None:
        return found
    began = monotonic_ms()
    try:
        told = await owned.client.checksums(within_s=RELOAD_S)
        took_s = (monotonic_ms() - began) / 1000.0
        plain = await anyio.to_thread.run_sync(model.plain, told, folder, abandon_on_cancel=True)
    except (EngineRefused, EngineUnreachable, SnapshotError) as error:
        log.info("its checksums prove nothing engine=%s error=%s", owned.name, error)
        return found
    log.info("checksums prove tensors=%d engine=%s seconds=%.3f", len(plain), owned.name, took_s)
    return msgspec.structs.replace(found, plain=plain, checksums_s=took_s if told else None)


async def _reloaded(owned: Owned, found: Model, folder: Path | None) -> tuple[Model, bool]:
    """With what a reload does, and whether it has spoilt the engine."""
    client = owned.client
    try:
        await client.resume(within_s=CALL_S)
        before = await owned.canary(within_s=RELOAD_S)
    except (EngineRefused, EngineUnreachable) as error:
        raise StartFailure("canary", str(error)) from error
    try:
        why = await _renumbered(owned, before, folder)
        again = await _loaded(owned, folder)
        spoilt = disagreement(again, before, tolerance=RETURNS)
        await client.pause("abort", within_s=CALL_S)
    except EngineRefused as error:
        return await _refused(owned, found, before, str(error))
    except EngineUnreachable as error:
        return _lost(owned, found, str(error)), True
    if why or spoilt:
        return _not(owned, found, why or f"the canary did not return: {spoilt}"), True
    log.info("a reload gives its weights back engine=%s", owned.name)
    return msgspec.structs.replace(found, reloads=True, tries=0), False


async def _renumbered(owned: Owned, before: Canary, folder: Path | None) -> str | None:
    """What differs once the renumbered model is loaded; None where nothing does, or it cannot be made."""
    if folder is None:
        return None
    copy = owned.shared.store.folder(owned.name) / "renumbered"
    shutil.rmtree(copy, ignore_errors=True)
    try:
        if not await anyio.to_thread.run_sync(_written, folder, copy):
            log.info(
                "its model cannot be renumbered: its own weights are reloaded only engine=%s", owned.name
            )
            return None
        seen = await _loaded(owned, copy)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    differs = disagreement(seen, before, tolerance=SAME)
    return (
        f"the same model, renumbered, computes something else once it is loaded: {differs}"
        if differs
        else None
    )


def _written(folder: Path, copy: Path) -> bool:
    try:
        axes = relabel.axes(folder)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if axes is None or shutil.disk_usage(copy.parent).free < size + SPARE_BYTES:
            return False
        relabel.write(folder, copy, axes)
    except (OSError, SnapshotError) as error:
        log.warning("its model cannot be renumbered folder=%s error=%s", folder, error)
        return False
    return True


async def _loaded(owned: Owned, folder: Path | None) -> Canary:
    """The canary after a reload, of the weights it was started on where there is no folder."""
    kwargs = {} if folder is None else {"weights_path": str(folder)}
    await owned.client.collective_rpc("reload_weights", kwargs, within_s=RELOAD_S)
    await owned.client.forget(running=True, within_s=CALL_S)
    return await owned.canary(within_s=RELOAD_S)


async def _refused(owned: Owned, found: Model, before: Canary, why: str) -> tuple[Model, bool]:
    """A refusal may have touched nothing: the engine tells."""
    try:
        seen = await owned.canary(within_s=RELOAD_S)
        await owned.client.pause("abort", within_s=CALL_S)
    except (EngineRefused, EngineUnreachable) as error:
        return _lost(owned, found, f"{why}; {error}"), True
    return _not(owned, found, why), disagreement(seen, before, tolerance=RETURNS) is not None


def _lost(owned: Owned, found: Model, why: str) -> Model:
    """It answers no more: by the reload, if it happens again."""
    if found.tries:
        return _not(owned, found, why)
    return msgspec.structs.replace(found, tries=1, why=why)


def _not(owned: Owned, found: Model, why: str) -> Model:
    log.warning("a reload does not give its weights back engine=%s error=%s", owned.name, why)
    return msgspec.structs.replace(found, reloads=False, why=why)
