"""What an agent has learned of an engine's model: whether it reloads rightly, and what its checksums prove.

Learned once, from the weights that the engine was started on, and again after a change of the model, of the
engine's version or of its command.
"""

import hashlib
import logging
from pathlib import Path

import msgspec

from relight.agents import snapshot
from relight.agents.node.config import base_model
from relight.agents.node.owned import Owned
from relight.agents.snapshot import Tensor
from relight.events import codec
from relight.events.errors import Undecodable

log = logging.getLogger(__name__)

MOST_BYTES = 2 << 30
"""Of tensors that are compared by content: a second of hashing. What lies behind them the canary judges."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is known."""

    of: str = ""
    """Of which model, engine and command."""
    reloads: bool | None = None
    """Whether a reload of the weights that it was started on left them as they were; none where that cannot
    be tried: it was started without weights."""
    why: str = ""
    """What the reload did instead."""
    tries: int = 0
    """Reloads during which the engine was lost: one may be chance."""
    plain: dict[str, Tensor] = {}
    """Tensors whose checksum in the engine is the hash of their bytes in the file."""
    checksums_s: float | None = None
    """Seconds that the engine took for its checksums; none where it gives none that are real."""


def known(owned: Owned) -> Model:
    """What was learned last, if anything."""
    path = _file(owned)
    try:
        return codec.from_json(path.read_bytes(), Model)
    except FileNotFoundError:
        return Model()
    except Undecodable as error:
        log.warning("what was learned of the model is learned anew path=%s error=%s", path, error)
        return Model()


def keep(owned: Owned, model: Model) -> None:
    owned.shared.store.put(_file(owned), codec.to_json(model).encode())


def identity(owned: Owned, version: str) -> str:
    """Of the model's files by name, size and time, of the engine's version and of its command."""
    config = owned.config
    whole = hashlib.sha256(f"{version}\0{config.command}\0{sorted(config.env.items())}".encode())
    base = base_model(config)
    for path in sorted(base.iterdir()) if base is not None else ():
        status = path.stat()
        whole.update(f"\0{path}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return whole.hexdigest()


def plain(checksums: dict[str, str], folder: Path) -> dict[str, Tensor]:
    """Tensors of `folder` that the engine holds as they are in the file. Raises SnapshotError."""
    told = by_name(checksums)
    found = snapshot.tensor_digests(folder, told.keys(), most_bytes=MOST_BYTES)
    forms = snapshot.tensors_in(sorted(folder.glob("*.safetensors")))
    return {name: forms[name] for name, digest in found.items() if told[name] == {digest}}


def odd(model: Model, checksums: dict[str, str], folder: Path) -> tuple[int, str | None]:
    """How many tensors could be compared with those of `folder`, and the first that differs.

    One that the engine does not tell any more differs too. Raises SnapshotError.
    """
    forms = snapshot.tensors_in(sorted(folder.glob("*.safetensors")))
    same = {name for name, form in model.plain.items() if forms.get(name) == form}
    told = by_name(checksums)
    found = snapshot.tensor_digests(folder, same, most_bytes=MOST_BYTES)
    for name, digest in found.items():
        if told.get(name) != {digest}:
            held = ", ".join(sorted(told.get(name, ()))) or "nothing"
            return len(found), f"tensor {name} is {held} in the engine and {digest} in {folder}"
    return len(found), None


def by_name(checksums: dict[str, str]) -> dict[str, set[str]]:
    """What all workers tell of a tensor: `dp0:pp0:pcp0:tp0:NAME` without the rank."""
    told: dict[str, set[str]] = {}
    for key, digest in checksums.items():
        told.setdefault(key.rpartition(":")[2], set()).add(digest)
    return told


def _file(owned: Owned) -> Path:
    return owned.shared.store.folder(owned.name) / "model.json"
