"""The memory of an engine's devices: what was in use before it, and the proof that it is back.

Memory may stay when every process is gone: a helper that mapped it pins it, and the driver gives it back
late. So the measure is the device itself: as much in use as before the start, less what the agent's other
engines hold. Where that was not told before the start, nobody else who came since may hold anything there
now. What cannot be asked is unknown, and unknown is no proof.
"""

import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple, Protocol, TypeVar

import anyio
import anyio.to_thread

from relight.agents.node import proc
from relight.agents.node.errors import NotProven
from relight.events.bus.clock import monotonic_ms
from relight.events.errors import RelightError
from relight.events.values import Process

log = logging.getLogger(__name__)

T = TypeVar("T")

SLACK_MIB = 200.0
"""More in use than before by less than this is nobody's: a bare CUDA context is 300 and more."""
IDLE_MIB = 1024.0
"""What a driver takes at most of a device that nobody uses; with more in use, somebody is not named."""
UNNAMED = "no process that the driver names"
UNRESOLVED = ""
"""In place of a uuid: which devices an engine has was not told. That is not the same as none."""
ASK_S = 5.0
"""For one answer of the driver, which gives one in milliseconds; a wedged one gives none."""
LATE_S = 1.0
"""That the driver may name a process longer than the kernel; with more it is one that cannot be seen here."""
POLL_S = 0.05


class DeviceUnknown(RelightError):
    """The driver does not tell."""


class Use(NamedTuple):
    """One process on a device, by the driver's number for it, which in a container may be the host's."""

    pid: int
    mib: float | None


class Device(NamedTuple):
    """One device at one moment."""

    uuid: str
    used_mib: float
    uses: tuple[Use, ...]


class Before(NamedTuple):
    """A device before an incarnation was started on it."""

    uuid: str
    mib: float | None
    """In use by others than this agent's engines; none where it was not told."""


class _Seen(NamedTuple):
    """One look at a device that is to be proven free."""

    held: str | None
    """What is not back, and who holds it."""
    told: bool = True
    """Whether it could be known that all is back, or whose it is that is held."""


class Devices(Protocol):
    """Whoever knows this machine's devices. Calls may block."""

    def select(self, visible: str | None) -> tuple[str, ...]:
        """The devices that a value of CUDA_VISIBLE_DEVICES means, `UNRESOLVED` for each that cannot be
        asked. Raises DeviceUnknown."""
        ...

    def look(self, uuid: str) -> Device:
        """What is in use on it. Raises DeviceUnknown."""
        ...


class Memory:
    """The device memory of one node's engines."""

    def __init__(self, devices: Devices | None, *, kin: Callable[[], Iterable[int]]) -> None:
        """`kin`: the pids of all processes of this agent's engines."""
        self._devices = devices
        self._kin = kin
        self._turns: dict[str, anyio.Lock] = {}

    async def devices(self, visible: str | None) -> tuple[str, ...]:
        """The devices that a value of CUDA_VISIBLE_DEVICES means; none where there is none to ask, and
        `UNRESOLVED` for those, or all, of which the driver does not tell."""
        if self._devices is None:
            return ()
        devices = self._devices
        try:
            return await _told(lambda: devices.select(visible))
        except DeviceUnknown as error:
            log.warning("the devices of an engine are not known error=%s", error)
            return (UNRESOLVED,)

    async def before(self, uuids: Iterable[str]) -> tuple[Before, ...]:
        """These devices as they are, an engine being about to be started on them."""
        devices = self._devices
        return tuple([await self._as_it_is(devices, uuid) for uuid in uuids]) if devices else ()

    async def _as_it_is(self, devices: Devices, uuid: str) -> Before:
        if uuid == UNRESOLVED:
            return Before(uuid, None)
        try:
            return Before(uuid, self._others(await _told(lambda: devices.look(uuid))))
        except DeviceUnknown as error:
            log.warning("device memory was not seen before a start error=%s", error)
            return Before(uuid, None)

    @asynccontextmanager
    async def turn(self, uuids: Iterable[str]) -> AsyncGenerator[None]:
        """Only one engine at a time takes memory on a device: each reckons with what it finds free there."""
        async with AsyncExitStack() as stack:
            for uuid in sorted(set(uuids) - {UNRESOLVED}):  # that one is not the same device for two engines
                await stack.enter_async_context(self._turns.setdefault(uuid, anyio.Lock()))
            yield

    async def proven_back(
        self,
        before: tuple[Before, ...],
        *,
        visible: str | None,
        within_s: float,
        processes: Iterable[Process] = (),
    ) -> bool | None:
        """True once all of it is back; None where there is no device to ask, or it cannot be known.

        To be called when every process of the incarnation is gone. `visible`: the value of
        CUDA_VISIBLE_DEVICES by which unresolved devices are asked for again; where there is none, all of the
        node's are looked at once: what is held there may be anybody's. `processes`: those of the incarnation,
        the first one among them; who started before them holds what is its own. Raises NotProven.
        """
        devices = self._devices
        named = {each.uuid for each in before}
        if devices is not None and UNRESOLVED in named:
            before = await self._resolved(before, visible)
        if devices is None or not before:
            return None
        now = monotonic_ms()
        deadline, late = now + within_s * 1000.0, now + min(within_s, LATE_S) * 1000.0
        since = min((process.start for process in processes), default=0)
        told = True
        for each in before:
            while (seen := await self._seen(devices, each, since)).held:
                guessed = visible is None and each.uuid not in named
                if guessed or (not seen.told and monotonic_ms() >= late):
                    break
                if monotonic_ms() >= deadline:
                    raise NotProven("memory", seen.held)
                await anyio.sleep(POLL_S)
            if seen.held:
                log.warning("whether device memory is back is not known held=%s", seen.held)
            told = told and seen.told and not seen.held
        return True if told else None

    async def _resolved(self, before: tuple[Before, ...], visible: str | None) -> tuple[Before, ...]:
        """With the devices that are told now and were not before a start."""
        known = {each.uuid: each for each in before if each.uuid != UNRESOLVED}
        told = dict.fromkeys((*known, *await self.devices(visible)))
        return tuple(known.get(uuid) or Before(uuid, None) for uuid in told)

    async def _seen(self, devices: Devices, before: Before, since: int) -> _Seen:
        if before.uuid == UNRESOLVED:
            return _Seen(None, told=False)
        try:
            device = await _told(lambda: devices.look(before.uuid))
        except DeviceUnknown as error:
            return _Seen(str(error))
        others = self._others(device)
        if before.mib is None:
            return self._seen_first(device, others, since)
        kin = set(self._kin())
        holders = "; ".join(_named(use) for use in device.uses if use.pid not in kin)
        more = others - before.mib
        if more <= SLACK_MIB:
            return _Seen(None)
        holders = holders or UNNAMED
        return _Seen(
            f"device {before.uuid} has {more:.0f} MiB more in use than before its start, held by {holders}"
        )

    def _seen_first(self, device: Device, others: float, since: int) -> _Seen:
        """Where what was in use before is not known: by who holds it now."""
        kin = set(self._kin())
        strangers = {use: _began(use.pid) for use in device.uses if use.pid not in kin}
        came = [use for use, began in strangers.items() if began is not None and began >= since]
        unseen = [use for use, began in strangers.items() if began is None]
        for uses in (came, came + unseen):
            if _mib(uses) > SLACK_MIB:
                holders = "; ".join(map(_named, uses))
                unknown = "what was in use before its start is not known"
                return _Seen(f"device {device.uuid} is held by {holders}, and {unknown}", told=uses is came)
        unnamed = others - _mib(strangers)  # of one that cannot be seen, or of nobody any more
        if unnamed > IDLE_MIB:
            return _Seen(f"device {device.uuid} has {unnamed:.0f} MiB in use, held by {UNNAMED}", told=False)
        if others > IDLE_MIB:
            log.warning("whether device memory is back is not known uuid=%s mib=%.0f", device.uuid, others)
        return _Seen(None, told=others <= IDLE_MIB)

    def _others(self, device: Device) -> float:
        """MiB in use by others than this agent's engines."""
        kin = set(self._kin())
        return device.used_mib - sum(use.mib or 0.0 for use in device.uses if use.pid in kin)


def _began(pid: int) -> int | None:
    """Clock ticks since the host's boot; none where no such process can be seen."""
    try:
        stat = proc.read_stat(pid)
    except OSError:
        return None
    return stat.start if stat else None


def _mib(uses: Iterable[Use]) -> float:
    """What they hold between them; without end where a size is not told."""
    return sum(math.inf if use.mib is None else use.mib for use in uses)


def _named(use: Use) -> str:
    size = "" if use.mib is None else f" {use.mib:.0f} MiB"
    command = proc.command_line(use.pid)[:120]
    return f"pid {use.pid}{size}{f' ({command})' if command else ''}"


async def _told(ask: Callable[[], T]) -> T:
    """What the driver says, in a thread: one that never answers holds up this question only."""
    with anyio.move_on_after(ASK_S):
        return await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
    raise DeviceUnknown(f"the driver gave no answer within {ASK_S:g} s")
