"""Reading safetensors folders: which tensors they hold, and one digest of their content.

The format is read here directly (a length, a JSON header, bytes) so that no process of the stub imports
numpy. The digest covers name, dtype, shape and bytes of each tensor, and neither sharding nor file names.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

_HEADER_LIMIT = 100_000_000  # the format's own limit, in bytes
_WIDTH = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_SLICE = 1 << 20


class BadWeights(Exception):
    """A model folder that cannot be loaded; the message says which file and why."""


class Tensor(msgspec.Struct, frozen=True):
    """One tensor's dtype, shape and the sha256 of its bytes in hex."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


Tensors = Mapping[str, Tensor]


def read_folder(folder: Path, *, values: bool = True) -> dict[str, Tensor]:
    """All tensors of a folder's `*.safetensors`; without `values` the bytes are not read and hash as none.

    Raises `BadWeights` for no folder, no file, a truncated or malformed one, a tensor that stands twice, or
    a file that the folder's index names and that is missing.
    """
    try:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise BadWeights(f"model folder {folder} holds no *.safetensors file")
        for name in _indexed(folder) - {file.name for file in files}:
            raise BadWeights(f"model folder {folder} lacks {name}, which its index names")
        tensors: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in _read_file(file, values=values).items():
                if name in tensors:
                    raise BadWeights(f"tensor {name} stands twice in {folder}")
                tensors[name] = tensor
    except OSError as error:
        raise BadWeights(f"model folder {folder} cannot be read: {error}") from error
    return tensors


def digest_of(tensors: Tensors) -> str:
    """sha256 in hex over the tensors in the order of their names."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(msgspec.json.encode([name, tensor.dtype, tensor.shape, tensor.sha256]))
    return whole.hexdigest()


def replaced(old: Tensors, new: Tensors) -> dict[str, Tensor]:
    """`old` with what `new` brings, as vLLM reloads: missing tensors keep their old values in silence.

    Raises `BadWeights` for a name that the model does not know and for another shape.
    """
    for name, tensor in new.items():
        known = old.get(name)
        if known is None:
            raise BadWeights(f"there is no parameter named {name!r} in the model")
        if known.shape != tensor.shape:
            raise BadWeights(f"tensor {name} has shape {list(tensor.shape)}, not {list(known.shape)}")
    return {**old, **new}


def _indexed(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        return set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except msgspec.MsgspecError as error:
        raise BadWeights(f"{index} is no index: {error}") from error


def _read_file(file: Path, *, values: bool) -> dict[str, Tensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise BadWeights(f"{file} is truncated: its header does not fit in its {size} bytes")
        try:
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except msgspec.MsgspecError as error:
            raise BadWeights(f"{file} has a malformed header: {error}") from error
        return {name: _read(stream, entry, 8 + length, size, values) for name, entry in entries.items()}


def _read(stream: BinaryIO, entry: _Entry, base: int, size: int, values: bool) -> Tensor:
    start, end = entry.data_offsets
    if not 0 <= start <= end or base + end > size:
        raise BadWeights(f"{stream.name} is truncated: it ends at {size} bytes, before {base + end}")
    width = _WIDTH.get(entry.dtype)
    if width is not None and math.prod(entry.shape) * width != end - start:
        raise BadWeights(f"{stream.name} holds {end - start} bytes for {entry.dtype} {list(entry.shape)}")
    content = hashlib.sha256()
    stream.seek(base + start)
    left = end - start if values else 0
    while left and (piece := stream.read(min(_SLICE, left))):
        content.update(piece)
        left -= len(piece)
    return Tensor(entry.dtype, entry.shape, content.hexdigest())
