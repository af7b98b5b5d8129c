"""Stopping an incarnation and proving that it is gone (S2): processes, ports, shared memory, folder.

SIGTERM once, a bounded grace, SIGKILL to everything that is found, until nothing more is found. No process
is asked whether it is dead. A stop that was interrupted is taken up by doing all of it again.
"""

import logging
import shutil
import signal
from typing import NamedTuple

import anyio
import msgspec

from relight.agents.node import launch, launcher, ports, proc, shm
from relight.agents.node.config import visible_devices
from relight.agents.node.errors import NotProven
from relight.agents.node.owned import Owned
from relight.agents.node.shm import Segment
from relight.agents.node.tree import UNSEEN, Tree
from relight.events.bus.clock import monotonic_ms
from relight.events.values import Proof

log = logging.getLogger(__name__)

PORT_S = 5.0
"""Longest wait for a port after the last process is gone; the kernel needs microseconds."""
PORT_POLL_S = 0.005
UNHELD_POLL_S = 0.05
"""Between two tries to hold a process, when descriptors had run out."""


class Remains(NamedTuple):
    """What an incarnation has on the machine."""

    tree: Tree
    """It holds what was found."""
    ports: tuple[int, ...]
    tmpdir: str
    segments: frozenset[Segment]


async def prove_gone(remains: Remains, *, grace: anyio.CancelScope | None = None, within_s: float) -> Proof:
    """Stop all of it, asking first as long as `grace` lasts; without one it is killed at once.

    Raises NotProven.
    """
    began = monotonic_ms()
    tree = remains.tree
    try:
        with anyio.fail_after(within_s):
            await _end_all(tree, grace)
    except TimeoutError as error:
        raise NotProven("process", _left(tree)) from error
    tree.reap()
    left_s = within_s - (monotonic_ms() - began) / 1000.0
    for port in remains.ports:
        await _port_proof(port, within_s=max(1.0, min(PORT_S, left_s)))
    for path in shm.remove(remains.segments):
        log.warning("a shared-memory segment is still in use path=%s tag=%s", path, tree.marks.tag)
    await _remove_folder(remains.tmpdir)
    return Proof(
        processes=tuple(tree.known),
        port=remains.ports[0] if remains.ports else None,
        port_free=bool(remains.ports),
        took_ms=monotonic_ms() - began,
    )


async def prove_present_gone(owned: Owned, *, grace_s: float, within_s: float) -> Proof:
    """Stop the recorded incarnation; what will be removed is on disk before. Raises NotProven."""
    began = monotonic_ms()
    if owned.tree is None:
        owned.watch()
    owned.note(phase="stopping")
    await launcher.of(owned).withdraw(owned, within_s=within_s)
    within_s = max(1.0, within_s - (monotonic_ms() - began) / 1000.0)
    tree = owned.tree or owned.watch()
    if grace_s == 0:
        _freeze(tree)
        owned.note_found()
    else:
        owned.look_around()
    owned.save()
    record = owned.record
    ours = (record.port,) if record.port is not None and record.local is not None else ()
    remains = Remains(tree, ours, record.tmpdir, frozenset(record.segments))
    grace = None
    if grace_s > 0:
        grace = owned.grace = anyio.CancelScope(deadline=anyio.current_time() + grace_s)
    proof = await prove_gone(remains, grace=grace, within_s=within_s)
    left_s = max(1.0, within_s - proof.took_ms / 1000.0)
    first = (record.leader,) if record.leader else ()
    memory_back = await owned.shared.memory.proven_back(
        record.devices,
        visible=visible_devices(owned.config),
        within_s=left_s,
        processes=(*first, *proof.processes),
    )
    proof = msgspec.structs.replace(proof, memory_back=memory_back, took_ms=monotonic_ms() - began)
    if not ours and record.port is not None:  # it never listened there, so another may
        proof = msgspec.structs.replace(proof, port=record.port, port_free=ports.bindable(record.port))
    if record.port is not None and owned.config.port is None:
        owned.shared.store.rest(record.port)
    owned.let_go()
    return proof


def _freeze(tree: Tree) -> None:
    """Stop all of it where it stands: memory that is shared after the last look could not be told to be its.

    It is about to be killed, by us or by whoever takes this stop up again.
    """
    tree.send(signal.SIGSTOP)
    while tree.find():
        tree.send(signal.SIGSTOP)


async def _end_all(tree: Tree, grace: anyio.CancelScope | None) -> None:
    """End what is held, then look for more, until a look finds nothing."""
    if grace is not None and tree.send(signal.SIGTERM):
        with grace:
            await tree.emptied()
    while True:
        tree.send(signal.SIGKILL)
        await tree.emptied()
        if not (tree.find() or tree.living or tree.unheld):
            return
        if tree.unheld:
            await anyio.sleep(UNHELD_POLL_S)


def _left(tree: Tree) -> str:
    texts: list[str] = []
    for process in tree.living:
        stat = proc.read_stat(process.pid)
        state = stat.state if stat else "gone now"
        if state == "D":
            state = "D, in the kernel, which no signal reaches"
        texts.append(f"pid {process.pid} (start {process.start}) is in state {state}")
    if why := tree.unheld.get(UNSEEN):
        texts.append(f"the process table cannot be read: {why}")
    held = [(process, why) for process, why in tree.unheld.items() if process != UNSEEN]
    texts += [f"pid {process.pid} cannot be held: {why}" for process, why in held]
    return "; ".join(texts) or "new processes of it kept appearing"


async def _port_proof(port: int, *, within_s: float) -> None:
    with anyio.move_on_after(within_s):
        while not ports.bindable(port):  # noqa: ASYNC110 -- nothing tells when a port is free
            await anyio.sleep(PORT_POLL_S)
        return
    raise NotProven("port", f"port {port} is held by {launch.holder(port)}")


async def _remove_folder(path: str) -> None:
    if not path:
        return
    try:
        await anyio.to_thread.run_sync(shutil.rmtree, path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise NotProven("folder", f"{path} cannot be removed: {error}") from error
