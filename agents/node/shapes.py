"""Names and shapes of a model's tensors: a load that lacks some answers 200 and keeps the old ones.

The first good load of an engine's model is the measure for all later ones; before it, the headers of the
base model are.
"""

import logging
from pathlib import Path

import msgspec

from relight.agents import snapshot
from relight.agents.node.config import base_model
from relight.agents.node.owned import Owned
from relight.agents.snapshot import Manifest
from relight.events import codec
from relight.events.errors import Undecodable

log = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]
SHOWN = 5
TIED = "lm_head.weight"
"""Stands in some snapshots of a model with tied embeddings and is left out of others."""


class _Config(msgspec.Struct):
    tie_word_embeddings: bool = False


def keep_shapes(owned: Owned, manifest: Manifest) -> None:
    """Remember the tensors of a load that was good."""
    path = _file(owned)
    if not path.exists():
        shapes: Shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
        owned.shared.store.put(path, codec.to_json(shapes).encode())


def forget_shapes(owned: Owned) -> None:
    """The model is another one now."""
    _file(owned).unlink(missing_ok=True)


def misfit(owned: Owned, manifest: Manifest, folder: Path) -> str | None:
    """How the tensors of `manifest` differ from those that the engine knows; None where they do not."""
    known = _known(owned)
    if known is None:
        return None
    found: Shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
    odd = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
    if odd == [TIED] and _tied(folder):
        return None
    if not odd:
        return None
    texts = [f"{name} {_shown(found.get(name))}, not {_shown(known.get(name))}" for name in odd[:SHOWN]]
    more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
    return "tensors that the engine does not expect: " + "; ".join(texts) + more


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _file(owned: Owned) -> Path:
    return owned.shared.store.folder(owned.name) / "shapes.json"


def _known(owned: Owned) -> Shapes | None:
    path = _file(owned)
    try:
        return codec.from_json(path.read_bytes(), Shapes)
    except FileNotFoundError:
        pass
    except Undecodable as error:
        log.warning("shapes are unreadable and made anew path=%s error=%s", path, error)
        path.unlink()
    base = base_model(owned.config)
    if base is None:
        return None
    try:
        tensors = snapshot.tensors_in(sorted(base.glob("*.safetensors")))
    except snapshot.SnapshotError as error:
        log.warning("the base model's headers cannot be read engine=%s error=%s", owned.name, error)
        return None
    return {name: tensor.shape for name, tensor in tensors.items()} or None


def _tied(folder: Path) -> bool:
    try:
        return codec.from_json((folder / "config.json").read_bytes(), _Config).tie_word_embeddings
    except (OSError, Undecodable):
        return False
