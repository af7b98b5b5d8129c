"""Devices that fail again and again are named; their agents avoid them where they have another."""

from typing import NamedTuple

from msgspec.structs import replace

from relight.events.ids import EngineName, NodeName
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
    oldest = work.now - int(window_s * 1000)
    worn = {known: tuple(at for at in times if at > oldest) for known, times in record.worn.items()}
    times = (*worn.get(device, ()), work.now)
    worn = {known: kept for known, kept in worn.items() if kept} | {device: times}
    work.learn(nodes={**work.meta.nodes, node: replace(record, worn=worn)})
    if len(times) == work.settings.device_failures:
        last = f"the last of {name}: {why}"
        detail = f"device {device} of node {node}: {len(times)} failures in {window_s:g} s, {last}"
        reason = "it may be broken; its agent takes another one where it has one"
        work.alarm("device", detail, reason=reason)
