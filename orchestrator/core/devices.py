"""Devices that fail again and again are named; their agents avoid them where they have another."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from relight.events.ids import EngineName, NodeName
from relight.events.schema import NodeRecord
from relight.events.values import Avoided
from relight.orchestrator.core.job import Work


class Device(NamedTuple):
    """What an engine ran on."""

    node: NodeName
    name: str | None
    """As its node file names it; none where it names none."""


def failed(work: Work, name: EngineName, at: Device, *, why: str) -> None:
    """The engine, or a part of it, was lost, or did not start, at that device."""
    node, device = at
    record = work.meta.nodes.get(node)
    if device is None or record is None:
        return
    window_s = work.settings.restart_window_s
    recent = _in_window(work, record)
    times = (*recent.get(device, ()), work.now)
    work.learn(nodes={**work.meta.nodes, node: replace(record, worn={**recent, device: times})})
    if len(times) == work.settings.device_failures:
        last = f"the last of {name}: {why}"
        detail = f"device {device} of node {node}: {len(times)} failures in {window_s:g} s, {last}"
        reason = "it may be broken; where its agent has another one, that is taken"
        work.alarm("device", detail, reason=reason)


def worn(work: Work, nodes: Iterable[NodeName]) -> tuple[Avoided, ...]:
    """The devices of these nodes that failed as often as is named, within the window; no others' names."""
    found: list[Avoided] = []
    for node in nodes:
        record = work.meta.nodes.get(node)
        recent = _in_window(work, record) if record is not None else {}
        often = sorted(name for name, times in recent.items() if len(times) >= work.settings.device_failures)
        if often:
            found.append(Avoided(node, tuple(often)))
    return tuple(found)


def _in_window(work: Work, record: NodeRecord) -> dict[str, tuple[int, ...]]:
    """When each device failed, as far as it counts."""
    oldest = work.now - int(work.settings.restart_window_s * 1000)
    recent = {name: tuple(at for at in times if at > oldest) for name, times in record.worn.items()}
    return {name: times for name, times in recent.items() if times}
