"""NVIDIA devices as NVML tells of them, through the optional `nvidia-ml-py`. A wedged driver may block."""

import logging
from pathlib import Path
from typing import Any

from relight.agents.node.devices import UNRESOLVED, Device, DeviceUnknown, Use

log = logging.getLogger(__name__)

_MIB = 1 << 20
_DRIVER = Path("/dev/nvidiactl")


class Nvml:
    """The port `Devices` on this machine's driver."""

    def __init__(self, library: Any) -> None:
        """`library` is the module `pynvml`, initialised."""
        self._nvml = library

    def select(self, visible: str | None) -> tuple[str, ...]:
        """The UUIDs that a value of CUDA_VISIBLE_DEVICES names; None is every device. `UNRESOLVED` stands for
        each that cannot be asked.

        Numbers are taken in PCI order, which is CUDA's own where all devices are of one kind or
        CUDA_DEVICE_ORDER says so. CUDA ends the list at the first entry that is none.
        """
        everything = self._uuids()
        if visible is None:
            return everything
        chosen: list[str] = []
        for word in filter(None, (part.strip() for part in visible.split(","))):
            if word.isdigit() and int(word) < len(everything):
                chosen.append(everything[int(word)])
            elif word.startswith("MIG-"):
                chosen.append(word)
            elif found := [uuid for uuid in everything if uuid.startswith(word)]:
                chosen.append(found[0])
            elif UNRESOLVED in everything and word.startswith("GPU-"):  # it may be that one
                chosen.append(UNRESOLVED)
            else:
                break
        return tuple(chosen)

    def look(self, uuid: str) -> Device:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used) / _MIB
            found = [
                *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
                *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
            ]
        except nvml.NVMLError as error:
            raise DeviceUnknown(f"device {uuid} cannot be asked: {error}") from error
        uses = {
            int(each.pid): Use(
                int(each.pid), None if each.usedGpuMemory is None else int(each.usedGpuMemory) / _MIB
            )
            for each in found
        }
        return Device(uuid, used, tuple(uses.values()))

    def _uuids(self) -> tuple[str, ...]:
        nvml = self._nvml
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise DeviceUnknown(f"the devices cannot be listed: {error}") from error
        return tuple(self._uuid(index) for index in range(count))

    def _uuid(self, index: int) -> str:
        """Of one that has fallen off the bus nothing is told; the others are as they were."""
        nvml = self._nvml
        try:
            return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            log.warning("a device cannot be asked index=%d error=%s", index, error)
            return UNRESOLVED


def found() -> Nvml | None:
    """This machine's devices; None where there is none to ask."""
    try:
        import pynvml
    except ImportError:
        if _DRIVER.exists():
            log.warning(
                "device memory is not proven free: nvidia-ml-py is missing (pip install relight[gpu])"
            )
        return None
    library: Any = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        if _DRIVER.exists():
            log.warning("device memory is not proven free: NVML does not answer error=%s", error)
        return None
    return Nvml(library)
