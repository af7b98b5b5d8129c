"""The same model with the numbers of its hidden dimension shuffled: other bytes everywhere, one function.

A reload that leaves any tensor behind mixes two numberings, and what the model computes is then far off; one
that loads all of them changes nothing but the order of sums. (Reloading the very weights that an engine has
shows neither: a copy that is left behind is right by chance. Measured with tied embeddings.)

Which axis of a tensor is the hidden one follows from the name of its module. A model with any name that is
not in the tables is left alone.
"""

from pathlib import Path
from typing import Any

import msgspec

from relight.agents.snapshot import Tensor, tensors_in
from relight.events import codec
from relight.events.errors import Undecodable

_TAKES = {
    *("embed_tokens", "lm_head"),
    *("q_proj", "k_proj", "v_proj", "qkv_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    *("gate", "router", "shared_expert_gate"),
}
"""Modules whose weight has the hidden dimension last, and whose bias does not have it."""
_GIVES = {"o_proj", "down_proj", "w2"}
"""Modules whose weight and bias have it first."""
_NORMS = {
    *("norm", "input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
_OTHERS = {"q_norm", "k_norm", "rotary_emb"}
"""Modules that do not have it."""

SEED = 20


class _Config(msgspec.Struct):
    hidden_size: int = 0


def hidden_size(folder: Path) -> int:
    """As the model's config tells it; 0 where it does not, or has no text model at its top."""
    try:
        return codec.from_json((folder / "config.json").read_bytes(), _Config).hidden_size
    except (OSError, Undecodable):
        return 0


def axes(folder: Path) -> dict[str, int | None] | None:
    """The hidden axis of each tensor; None where the model is not one of those that are understood.

    Raises SnapshotError.
    """
    hidden = hidden_size(folder)
    forms = tensors_in(sorted(folder.glob("*.safetensors")))
    if not hidden or not forms:
        return None
    found: dict[str, int | None] = {}
    for name, form in forms.items():
        axis = _axis(name, form)
        if axis is _UNKNOWN or (axis is not None and form.shape[axis] != hidden):
            return None
        found[name] = axis
    return found


_UNKNOWN = -1


def _axis(name: str, form: Tensor) -> int | None:
    parts = name.split(".")
    module, kind = (parts[-2], parts[-1]) if len(parts) > 1 else ("", "")
    last = len(form.shape) - 1
    match kind:
        case "weight" if module in _TAKES and last == 1:
            return last
        case "weight" if module in _GIVES and last == 1:
            return 0
        case "weight" if module in _NORMS and last == 0:
            return 0
        case "bias" if module in _GIVES and last == 0:
            return 0
        case "bias" if module in _TAKES:
            return None
        case _:
            return None if module in _OTHERS else _UNKNOWN


def write(folder: Path, into: Path, hidden_axes: dict[str, int | None]) -> None:
    """The relabelled copy of `folder`, as large as it is. Raises OSError."""
    import numpy as np

    order: Any = np.random.default_rng(SEED).permutation(hidden_size(folder))
    into.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            _write_shard(path, into / path.name, hidden_axes, order)
        elif path.is_file():
            (into / path.name).symlink_to(path.resolve())


class _Entry(msgspec.Struct):
    """A tensor in a safetensors header; that of the file's own metadata has no shape."""

    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def _write_shard(source: Path, target: Path, hidden_axes: dict[str, int | None], order: Any) -> None:
    import numpy as np

    with source.open("rb") as old, target.open("xb") as new:
        length = old.read(8)
        header = old.read(int.from_bytes(length, "little"))
        new.write(length + header)
        entries = codec.from_json(header, dict[str, _Entry])
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            data = old.read(entry.data_offsets[1] - entry.data_offsets[0])
            axis = hidden_axes[name]
            if axis is not None and data:
                width = len(data) // int(np.prod(entry.shape))
                whole = np.frombuffer(data, dtype=f"V{width}").reshape(entry.shape)
                data = np.take(whole, order, axis=axis).tobytes()
            new.write(data)
