"""What the engine's own checksums say of the weights that it shall hold."""

import logging
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from relight.agents import snapshot
from relight.agents.adapters.vllm import EngineRefused
from relight.agents.node import canary, model
from relight.agents.node.config import base_model, starts_empty
from relight.agents.node.owned import Owned
from relight.agents.node.record import RANDOM
from relight.agents.snapshot import SnapshotError
from relight.events.bus.clock import monotonic_ms

log = logging.getLogger(__name__)

CHEAP_S = 0.1
"""Checksums that take no longer are looked at in each load of a serving engine, which is held meanwhile."""


class Content(NamedTuple):
    """What was looked at."""

    checksums: str | None = None
    """One digest over all of them; none where the engine gives no real ones."""
    compared: int = 0
    """Tensors that were compared with those of the snapshot."""
    error: str | None = None
    """The first one that differs, as a sentence."""


async def look(owned: Owned, folder: Path | None, *, within_s: float) -> Content:
    """Ask the engine and compare with `folder`, the weights it shall hold. Raises EngineUnreachable."""
    if not owned.config.checksums:
        return Content()
    began = monotonic_ms()
    try:
        told = await owned.client.checksums(within_s=within_s)
    except EngineRefused as error:
        log.info("the engine gives no checksums engine=%s error=%s", owned.name, error)
        return Content()
    known = _learned(owned, took_s=(monotonic_ms() - began) / 1000.0)
    if folder is None:
        return Content(canary.combined(told))
    try:
        compared, differs = await anyio.to_thread.run_sync(
            model.odd, known, told, folder, abandon_on_cancel=True
        )
    except SnapshotError as gone:  # removed since it was loaded, as a newer version stands
        log.info("the weights cannot be compared engine=%s error=%s", owned.name, gone)
        return Content(canary.combined(told))
    return Content(canary.combined(told), compared, differs)


def _learned(owned: Owned, *, took_s: float) -> model.Model:
    """What is known of the model: its checksums cost what they took when least was in their way.

    Nothing is written once they are cheap: an engine may be held for this look.
    """
    known = model.known(owned)
    if known.checksums_s is not None and took_s < known.checksums_s and not _cheap(known):
        known = msgspec.structs.replace(known, checksums_s=took_s)
        model.keep(owned, known)
    return known


def is_cheap(owned: Owned) -> bool:
    """Whether a serving engine may be asked in the middle of a load."""
    return _cheap(model.known(owned))


def _cheap(known: model.Model) -> bool:
    return known.checksums_s is not None and known.checksums_s <= CHEAP_S


def folder_of(owned: Owned) -> Path | None:
    """Where the weights lie that the engine shall hold; None for those that were pushed."""
    record = owned.record
    if record.uri is not None:
        return snapshot.directory_of(record.uri)
    return base_model(owned.config) if record.version is None else None


def origin_of(owned: Owned) -> str | None:
    """What `Record.canary_of` says of a canary that the engine's present weights are to give."""
    if owned.record.version is None and starts_empty(owned.config):
        return RANDOM
    folder = folder_of(owned)
    return None if folder is None else str(folder)
