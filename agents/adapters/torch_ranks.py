"""The ranks of an initialised torch.distributed, heard over a gloo group of relight's own.

Gloo closes a pair of ranks after the first time-out, so a group that failed once is never used again.
"""

import datetime
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from relight.agents.trainer.ranks import Ranks, RanksLost, Solo


def ranks(*, deadline_s: float) -> Ranks:
    """A new group of every rank of the application, which all enter this; alone where there is no other.

    Raises RanksLost where one does not come within `deadline_s`, which also bounds each later word.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Solo()
    return _Gloo(deadline_s)


class _Gloo:
    def __init__(self, deadline_s: float) -> None:
        self._dist: Any = import_module("torch.distributed")
        self._deadline_s = deadline_s
        self._lost: str | None = None
        self._group: Any = None
        self.rank = int(self._dist.get_rank())
        self.size = int(self._dist.get_world_size())
        self._group = self._heard(
            self._dist.new_group, backend="gloo", timeout=datetime.timedelta(seconds=deadline_s)
        )

    def tell(self, data: bytes) -> bytes:
        box = [data if self.rank == 0 else None]
        self._heard(self._dist.broadcast_object_list, box, src=0, group=self._group)
        told = box[0]
        assert told is not None
        return told

    def gather(self, data: bytes) -> list[bytes]:
        told: list[Any] = [None] * self.size
        self._heard(self._dist.all_gather_object, told, data, group=self._group)
        return told

    def close(self) -> None:
        if self._group is not None and self._dist.is_initialized():
            with suppress(RuntimeError):  # its other ends may be gone
                self._dist.destroy_process_group(self._group)
        self._group = None
        self._lost = self._lost or "its group was left"

    def _heard(self, call: Any, *args: Any, **options: Any) -> Any:
        if self._lost is not None:
            raise RanksLost(f"rank {self.rank} of {self.size} hears no other rank any more: {self._lost}")
        try:
            return call(*args, **options)
        except RuntimeError as error:  # of gloo and of the store: closed connections and time-outs
            self._lost = str(error).partition("\n")[0]
            self.close()
            raise RanksLost(
                f"rank {self.rank} of {self.size}: another rank has ended, or was not heard for"
                f" {self._deadline_s:g} s: {self._lost}"
            ) from error
