"""Tensors of any framework as what a file needs of them: a name, a dtype, a shape and bytes.

Bytes are taken only when a shard is written, so that at most two shards of device weights lie in the host's
memory at a time.
"""

from collections.abc import Callable, Hashable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from relight.agents.snapshot import Tensor
from relight.events.errors import UsageError

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Names of dtypes in numpy (with ml_dtypes) and torch, and in safetensors."""

BITS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "BF16": 16}


class Named(NamedTuple):
    """One tensor on its way into a file."""

    name: str
    form: Tensor
    data: Callable[[], memoryview]
    """Its bytes, C order, little endian. They stay as they are until the export has ended."""
    joins: Callable[[], object] | None = None
    """What every rank calls while rank 0 takes the bytes of a tensor that is spread over them."""

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.form.shape) * width(self.form.dtype)


def width(dtype: str) -> int:
    """Bytes of one element of a safetensors dtype."""
    return BITS.get(dtype, int("".join(filter(str.isdigit, dtype)) or 8)) // 8


def dtype_of(name: str, dtype: str) -> str:
    """The safetensors name of `dtype`; raises UsageError that names the tensor."""
    if dtype not in DTYPES:
        raise UsageError(f"tensor {name!r} has dtype {dtype}, which safetensors does not hold")
    return DTYPES[dtype]


class Origin(Protocol):
    """Where a snapshot's tensors and side files come from."""

    def tensors(self) -> list[Named]: ...

    def fingerprint(self) -> Hashable | None:
        """What changes when a tensor does; None where that cannot be seen."""
        ...

    def side_files(self, directory: Path) -> None:
        """Write what a loader needs beside the tensors (a config)."""
        ...


Arrays = Mapping[str, Any]
"""Name to numpy array or torch tensor."""


class ArrayOrigin:
    """A mapping of arrays, or a function that returns one."""

    def __init__(self, model: Arrays | Callable[[], Arrays]) -> None:
        self._model = model

    def tensors(self) -> list[Named]:
        arrays = self._model() if callable(self._model) else self._model
        return [_named(name, array) for name, array in arrays.items()]

    def fingerprint(self) -> Hashable | None:
        return None

    def side_files(self, directory: Path) -> None:
        """A mapping brings none."""


def _named(name: str, array: Any) -> Named:
    if isinstance(array, np.ndarray | np.generic):
        return _numpy(name, cast(Any, array))
    from relight.agents.adapters import torch

    return torch.named(name, array)


def _numpy(name: str, array: Any) -> Named:
    form = Tensor(dtype_of(name, array.dtype.name), tuple(array.shape))

    def data() -> memoryview:
        whole: Any = np.ascontiguousarray(array)
        if whole.dtype.byteorder == ">":
            whole = whole.astype(whole.dtype.newbyteorder("<"))
        return memoryview(whole.reshape(-1).view(np.uint8))

    return Named(name, form, data)


def origin(model: Any) -> Origin:
    """What reads `model`: a torch module, a mapping of arrays, or a function that returns one."""
    if hasattr(model, "state_dict"):
        from relight.agents.adapters import torch

        return torch.ModuleOrigin(model)
    if callable(model) or isinstance(model, Mapping):
        return ArrayOrigin(cast(Any, model))
    raise UsageError(
        f"a model is a torch module, a mapping of arrays or a function, not {type(model).__name__}"
    )
