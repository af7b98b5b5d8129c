"""The trainer's side of vLLM's weight transfer: its factory, and the live tensors as a source of it.

The shapes are those of vLLM 0.32: `vllm.distributed.weight_transfer`.
"""

from collections.abc import Hashable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from relight.agents.adapters.torch import ModuleOrigin
from relight.events.errors import UsageError

if TYPE_CHECKING:
    from relight.agents.trainer.group import Control, Meeting, Open, Sender, Source


def source(model: Any) -> "Source":
    """The tensors of a torch module, in the names of its checkpoint; raises UsageError."""
    if not hasattr(model, "state_dict"):
        raise UsageError(f"VllmTransferSync takes a torch module, not {type(model).__name__}")
    return _Tensors(ModuleOrigin(model))


def opener(backend: str) -> "Open":
    """What vLLM's trainer factory makes of `backend`, whose init info takes a meeting's fields."""

    def open_group(meeting: "Meeting", control: "Control", tensors: "Source") -> "Sender":
        factory: Any = import_module("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
        info = _init_info(factory, backend)(
            master_address=meeting.address,
            master_port=meeting.port,
            world_size=meeting.world_size,
            rank=meeting.rank,
        )
        sender: Sender = factory.trainer_init(info, client=control, source=_as_vllms(tensors))
        return sender

    return open_group


def _init_info(factory: Any, backend: str) -> Any:
    known: Any = factory._registry
    if backend not in known:
        raise UsageError(f"vLLM has no weight-transfer backend {backend!r}; it has {sorted(known)}")
    return known[backend]().init_info_cls


class _Tensors:
    """A module's tensors, whole. A fresh iteration each time, in one order on every rank."""

    def __init__(self, origin: ModuleOrigin) -> None:
        self._origin = origin
        self._under_way: Iterator[tuple[str, Any]] | None = None

    def fingerprint(self) -> Hashable | None:
        return self._origin.fingerprint()

    def metadata(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        """Name, dtype and shape of each; nothing is gathered."""
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._origin.chosen().items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self._under_way = self._whole()
        return self._under_way

    def begin(self) -> None:
        self._under_way = None

    def drain(self) -> None:
        for _ in self._whole() if self._under_way is None else self._under_way:
            pass

    def _whole(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._origin.chosen().items():
            gather = getattr(tensor, "full_tensor", None)
            yield name, (tensor if gather is None else gather()).detach()


def _as_vllms(tensors: Any) -> Any:
    """The same as a `WeightSource`."""
    base: Any = import_module("vllm.distributed.weight_transfer.base")

    class Live(base.WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(*meta) for meta in tensors.metadata()]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            return iter(tensors)

    return Live()
