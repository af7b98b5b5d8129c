# ruff: noqa: N802 -- the functions have the C library's names
"""A library that stands for NVIDIA's: the real `nvidia-ml-py` calls it as it calls libnvidia-ml.so.1.

Its cards hold memory for processes, and give it back as a driver does: once the process has ended.
"""

import ctypes
from types import ModuleType
from typing import Any

import pynvml

from relight.agents.node import proc
from relight.events.values import Process

MIB = 1 << 20
INSUFFICIENT, NOT_FOUND, LOST = 7, 6, 15


class Card:
    """One device with 80 GiB."""

    def __init__(self, uuid: str, *, used_mib: int = 600) -> None:
        self.uuid = uuid
        self.lost = False
        """Fallen off the bus: every question is an error."""
        self.nameless = False
        """So lost that not even a handle is given."""
        self.hidden = False
        """The driver names no process, as in a container."""
        self._used_mib = used_mib
        self._held: dict[Process, int] = {}

    def hold(self, process: Process, mib: int) -> None:
        self._held[process] = mib

    @property
    def held(self) -> dict[Process, int]:
        return {p: mib for p, mib in self._held.items() if proc.liveness(p) is proc.Liveness.ALIVE}

    @property
    def used(self) -> int:
        return (self._used_mib + sum(self.held.values())) * MIB


class Library:
    """The functions of the C library that relight's use of nvidia-ml-py ends in."""

    def __init__(self, *cards: Card) -> None:
        self.cards = cards

    def _card(self, handle: Any) -> Card:
        return self.cards[ctypes.cast(handle, ctypes.c_void_p).value - 1]  # type: ignore[operator]

    def nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def nvmlErrorString(self, code: int) -> bytes:
        return f"error {code} of the fake".encode()

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        if self.cards[index.value].nameless:
            return LOST
        device._obj.contents = ctypes.cast(index.value + 1, type(device._obj)).contents
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        for index, card in enumerate(self.cards):
            if card.uuid == uuid.value.decode():
                return self.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), device)
        return NOT_FOUND

    def nvmlDeviceGetUUID(self, device: Any, buffer: Any, length: Any) -> int:
        buffer.value = self._card(device).uuid.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        card = self._card(device)
        if card.lost:
            return LOST
        memory._obj.total, memory._obj.used = 80 * 1024 * MIB, card.used
        memory._obj.free = memory._obj.total - memory._obj.used
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, infos: Any) -> int:
        card = self._card(device)
        held = {} if card.hidden else card.held
        count._obj.value = len(held)
        if held and infos is None:
            return INSUFFICIENT
        for info, (process, mib) in zip(infos or (), held.items(), strict=False):
            info.pid, info.usedGpuMemory = process.pid, mib * MIB
        return 0

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, device: Any, count: Any, infos: Any) -> int:
        count._obj.value = 0
        return 0


def loaded(monkeypatch: Any, *cards: Card) -> ModuleType:
    """The module `pynvml` on a library with these cards, for the length of a test."""
    monkeypatch.setattr(pynvml, "nvmlLib", Library(*cards))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    pynvml.nvmlInit()
    return pynvml
