"""What touches torch: a module's tensors in its Hugging Face names, their bytes, and whether they changed.

Nothing here runs in relight's bus thread. Collectives are entered where the bytes of a tensor that is spread
over several ranks are taken (`Named.data` and `Named.joins`), and nowhere else.
"""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from relight.agents.snapshot import Tensor
from relight.agents.trainer.tensors import Named, dtype_of
from relight.events.errors import UsageError

_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
}
"""Types that wrap a model, and the attribute under which each keeps it."""

_COMPILED = "_orig_mod."
"""What torch.compile of a layer puts into the names below it."""


class ModuleOrigin:
    """A torch module (a Hugging Face model, or any other) as a snapshot's source."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def tensors(self) -> list[Named]:
        return [named(name, tensor) for name, tensor in self.chosen().items()]

    def chosen(self) -> Mapping[str, Any]:
        """Every tensor of the state dict once: of tied ones the name that a checkpoint keeps."""
        model = unwrapped(self._model)
        _refuse_flat(model)
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
        tied = _tied_names(model)
        kept: dict[Any, str] = {}
        for name in sorted(state, key=lambda name: name in tied):
            kept.setdefault(_place(name, state[name]), name)
        names = set(kept.values())
        chosen = {name.replace(_COMPILED, ""): state[name] for name in state if name in names}
        return _checkpoint_names(model, chosen)

    def fingerprint(self) -> "Fingerprint | None":
        """Changes with every in-place write to a parameter or buffer and with every swap of its storage.

        Writes through `.data` or a NumPy view are not seen (torch counts none): a step that is given to
        the boundary, or `swapped`, tells of those. None for inference tensors, which count nothing.
        """
        try:
            return Fingerprint(_live(unwrapped(self._model)))
        except RuntimeError:
            return None

    def side_files(self, directory: Path) -> None:
        """`config.json`, the architecture in it, and `generation_config.json`, where the model has them."""
        model = unwrapped(self._model)
        if hasattr(getattr(model, "config", None), "save_pretrained"):
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.dtype = str(getattr(model, "dtype", "torch.float32")).removeprefix("torch.")
            config.save_pretrained(directory)
        if hasattr(getattr(model, "generation_config", None), "save_pretrained"):
            model.generation_config.save_pretrained(directory)


class Fingerprint:
    """Which storages some tensors have, and how often each was written to. Equal: they are what they were.

    Storages are held weakly: they may be freed, but while this stands no other one gets their identity, as
    it gets their address.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        weak: Any = import_module("torch.multiprocessing.reductions").StorageWeakRef
        seen: list[tuple[int, int, int]] = []
        self._held: list[Any] = []
        for tensor in tensors:
            part = getattr(tensor, "_local_tensor", tensor)
            storage = part.untyped_storage()
            self._held.append(weak(storage))
            seen.append((tensor._version, storage._cdata, part.storage_offset()))
        self._seen = tuple(seen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self._seen == other._seen

    def __hash__(self) -> int:
        return hash(self._seen)


def unwrapped(model: Any) -> Any:
    """The model inside torch.compile's and the parallel wrappers."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, attribute)
    return model


def named(name: str, tensor: Any) -> Named:
    """`tensor` on its way into a file; copied to the host, and made contiguous, when its bytes are taken."""
    torch: Any = import_module("torch")
    form = Tensor(dtype_of(name, str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape))

    spread = getattr(tensor, "full_tensor", None)

    def data() -> memoryview:
        whole = (tensor if spread is None else spread()).detach().to("cpu").contiguous()
        if not whole.numel():
            return memoryview(b"")
        return memoryview(whole.reshape(-1).view(torch.uint8).numpy())

    return Named(name, form, data, joins=spread)


def _live(model: Any) -> Iterator[Any]:
    """The tensors. What FSDP has gathered for a forward pass is put back first: it would look changed."""
    for module in model.modules():
        if hasattr(module, "reshard") and type(module).__name__.startswith("FSDP"):
            module.reshard()
    yield from model.parameters()
    yield from model.buffers()


def _refuse_flat(model: Any) -> None:
    """FSDP1 keeps flat parameters, which have no names of their own."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) keeps flat parameters: shard with fully_shard, or give"
            " SnapshotSync a function that returns the full tensors on rank 0; it is called on every rank,"
            " so that it may gather them"
        )


def _pointer(tensor: Any) -> int:
    """Its address; 0 where it has none (meta and wrapper tensors)."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def _place(name: str, tensor: Any) -> Any:
    """Equal for two names of one tensor; a tensor without storage is only itself.

    One that is spread over ranks is told by its object: a rank may hold no part of it.
    """
    if hasattr(tensor, "full_tensor"):
        return id(tensor)
    pointer = _pointer(tensor)
    if not pointer or not tensor.numel():
        return name
    return (pointer, tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _tied_names(model: Any) -> set[str]:
    """Names that Hugging Face leaves out of a checkpoint because another tensor is tied to them."""
    tied: Any = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None)
    return set(tied or ())


def _checkpoint_names(model: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undo the renaming that transformers 5 does on load, so that every loader knows the names."""
    loading: Any = sys.modules.get("transformers.core_model_loading")
    if loading is None or not hasattr(model, "config"):
        return state
    reverted: Mapping[str, Any] = loading.revert_weight_conversion(model, dict(state))
    return reverted
