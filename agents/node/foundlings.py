"""Processes of an engine that no record speaks of: the disk was lost, or an old one came back.

They are known by the tag, which an agent of the same job and state directory can make again, and by what
the orchestrator remembers. An identity that the orchestrator names but that bears no mark is never killed.
"""

import logging
import os
from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

from relight.agents.node import launch, marks, proc, shm, sockets, stop
from relight.agents.node.config import visible_devices
from relight.agents.node.devices import UNRESOLVED, Before
from relight.agents.node.errors import NotProven
from relight.agents.node.marks import Marks
from relight.agents.node.owned import Owned
from relight.agents.node.proc import Liveness
from relight.agents.node.record import Member
from relight.agents.node.stop import Remains
from relight.agents.node.tree import Exit, Tree
from relight.events.bus.clock import monotonic_ms
from relight.events.decisions import LoadWeights
from relight.events.schema import EngineState
from relight.events.values import Phase, Process, Proof

log = logging.getLogger(__name__)


def marks_of(owned: Owned, incarnation: int, processes: Iterable[Process]) -> Marks:
    """The marks of an incarnation, made again from its number and those of its processes that live."""
    tag = owned.tag(incarnation)
    plain = Marks(tag, str(marks.folder_of(tag)), None)
    for process in processes:
        stat = proc.read_stat(process.pid)
        if stat is not None and stat.process == process and marks.bears(process, plain):
            first = proc.read_stat(stat.session)
            if stat.session in (0, os.getsid(0)):
                continue
            return plain._replace(leader=first.process if first else Process(stat.session, 0))
    return plain


async def prove_gone(owned: Owned, incarnation: int, named: Iterable[Process], *, within_s: float) -> Proof:
    """Stop and prove an incarnation of which there is no record. Raises NotProven.

    Its ports are those on which it still listens, and the slot's own where that stays across incarnations.
    """
    began = monotonic_ms()
    named = tuple(named)
    family = owned.family()
    found = tuple(family.get(incarnation, ()))
    alone = owned.record.phase == "absent" and not family.keys() - {incarnation}
    literal = {owned.config.port} if owned.config.port is not None and alone else set[int]()
    tree = Tree(marks_of(owned, incarnation, (*found, *named)), _unwatched)
    try:
        tree.find()
        for process in named:
            _check_named(tree, process)
        living = tree.living
        remains = Remains(
            tree,
            tuple(sorted(literal | sockets.listening_ports(process.pid for process in living))),
            tree.marks.tmpdir,
            frozenset(shm.mapped_by(living, since_ns=0)),
        )
        proof = await stop.prove_gone(remains, within_s=within_s)
    finally:
        tree.close()
    memory_back = await owned.shared.memory.proven_back(
        (Before(UNRESOLVED, None),),
        visible=visible_devices(owned.config),
        within_s=max(1.0, within_s - proof.took_ms / 1000.0),
        processes=named,
    )
    return msgspec.structs.replace(
        proof,
        processes=tuple({*proof.processes, *named}),
        memory_back=memory_back,
        took_ms=monotonic_ms() - began,
    )


def _check_named(tree: Tree, process: Process) -> None:
    """A named process must be dead or known by its marks; a kill by number alone could hit anyone."""
    if process in tree.known:
        return
    match proc.liveness(process):
        case Liveness.ALIVE:
            raise NotProven("process", f"pid {process.pid} (start {process.start}) lives and bears no mark")
        case Liveness.UNKNOWN:
            raise NotProven("process", f"pid {process.pid} (start {process.start}): the kernel does not tell")
        case Liveness.DEAD:
            return


def recall(owned: Owned, state: EngineState) -> bool:
    """Take up an incarnation of a lost disk, where all that the orchestrator knows of it still holds.

    One that was told to load is not taken up: nobody can say how much of the load had been written.
    """
    incarnation = state.incarnation
    if isinstance(state.intent, LoadWeights):
        return False
    if owned.config.part:
        return _recall_part(owned, state)
    if owned.record.phase != "absent" or incarnation not in owned.foundlings or state.address is None:
        return False
    if not state.processes or any(proc.liveness(each) is not Liveness.ALIVE for each in state.processes):
        return False
    port = urlsplit(state.address).port
    marked = marks_of(owned, incarnation, state.processes)
    held = sockets.listeners(port) if port else []
    if not any(sockets.holds_socket(p.pid, {each.inode for each in held}) for p in state.processes):
        return False
    owned.note(
        incarnation=incarnation,
        phase="up",
        dead=False,
        paused=state.phase not in (Phase.SERVING, Phase.DRAINING),
        tag=marked.tag,
        tmpdir=marked.tmpdir,
        leader=marked.leader,
        port=port,
        address=state.address,
        local=launch.local_url(held[0].host, port),
        host_boot=owned.shared.store.host_boot,
        version=state.version,
        digest=state.digest,
        members=tuple(Member(process, "other") for process in state.processes),
    )
    owned.watch()
    owned.foundlings.clear()
    owned.save(members=owned.members())
    return True


def _recall_part(owned: Owned, state: EngineState) -> bool:
    """The same of a further part, which has no server."""
    incarnation = state.incarnation
    part = state.parts[owned.config.part - 1] if owned.config.part <= len(state.parts) else None
    if part is None or part.node != owned.shared.node or part.up != incarnation:
        return False
    if owned.record.phase != "absent" or incarnation not in owned.foundlings or not part.processes:
        return False
    marked = marks_of(owned, incarnation, part.processes)
    if any(proc.liveness(each) is not Liveness.ALIVE for each in part.processes):
        return False
    if marked.leader is None or marked.leader not in part.processes:
        return False  # without the one that was started its end would not be noticed
    owned.note(
        incarnation=incarnation,
        phase="up",
        dead=False,
        paused=False,
        tag=marked.tag,
        tmpdir=marked.tmpdir,
        leader=marked.leader,
        host_boot=owned.shared.store.host_boot,
        members=(Member(marked.leader, "leader"),),
    )
    owned.watch()
    owned.foundlings.clear()
    owned.save(members=owned.members())
    return True


def _unwatched(_: Exit) -> None:
    """Their end is awaited, not judged."""
