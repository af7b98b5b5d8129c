"""The processes of one incarnation, each held by a pidfd from the moment it is known until it is gone.

Invariant: a process leaves `living` only when its own descriptor said that it ended. Signals go to
processes that are held, so no signal ever reaches a pid that was taken by another.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable
from typing import NamedTuple

import anyio

from relight.agents.node import marks, pidfd, proc
from relight.agents.node.marks import Found, Marks, Role
from relight.agents.node.pidfd import Status
from relight.events.bus.clock import monotonic_ms
from relight.events.values import Process

log = logging.getLogger(__name__)


UNSEEN = Process(0, 0)
"""Stands for whatever a process table holds that cannot be read."""


class Exit(NamedTuple):
    """The end of one process."""

    process: Process
    role: Role
    status: Status
    seen_ms: float
    """Monotonic time at which its descriptor became readable to us."""


class _Held(NamedTuple):
    role: Role
    fd: int


class Tree:
    """Processes under watch. `on_exit` is called in the event loop, once for each that ends."""

    def __init__(self, marked: Marks, on_exit: Callable[[Exit], None]) -> None:
        self.marks = marked
        self.known: dict[Process, Role] = {}
        """All that ever belonged to the incarnation."""
        self.ends: dict[Process, Status] = {}
        """How those ended that were held."""
        self.unheld: dict[Process, str] = {}
        """Processes that were found and could not be held, with the reason; they may live."""
        self._on_exit = on_exit
        self._held: dict[Process, _Held] = {}
        self._changed = anyio.Event()

    @property
    def living(self) -> tuple[Process, ...]:
        return tuple(self._held)

    @property
    def vital(self) -> tuple[Process, ...]:
        """Those whose end is the engine's death, alive or not."""
        return tuple(process for process, role in self.known.items() if role in marks.VITAL)

    def add(self, process: Process, role: Role) -> bool:
        """Watch this process; False where it is gone already or was added before.

        One that cannot be held (no descriptors left, not ours to see) is kept in `unheld`.
        """
        if process in self._held:
            held = self._held[process]
            if role not in ("other", held.role) and held.role != "leader":  # it was seen before its exec(2)
                self.known[process] = role
                self._held[process] = held._replace(role=role)
            return False
        try:
            fd = pidfd.hold(process)
        except OSError as error:
            self.unheld[process] = error.strerror or str(error)
            return False
        self.unheld.pop(process, None)
        if fd is None:
            self.known.setdefault(process, role)
            return False
        self.known[process] = role
        self._held[process] = _Held(role, fd)
        asyncio.get_running_loop().add_reader(fd, self._ended, process)
        return True

    def find(self) -> tuple[Process, ...]:
        """Look for processes of the incarnation that are not held yet, hold them, and return those.

        Where the process table cannot be read, that stands in `unheld` under `UNSEEN`.
        """
        self.unheld.clear()
        try:
            found = marks.search(self.marks, self.known)
        except OSError as error:
            self.unheld[UNSEEN] = error.strerror or str(error)
            return ()
        return tuple(each.process for each in found if self._is_new(each))

    def _is_new(self, found: Found) -> bool:
        if found.dead and (found.process in self.known or proc.read_stat(found.process.pid) is None):
            return False  # a zombie whose parent does not reap it: its end was told, or is about to be
        return self.add(found.process, found.role) and not found.dead

    def send(self, number: signal.Signals) -> int:
        """Signal everything that is held; how many were reached."""
        reached = 0
        for process, held in tuple(self._held.items()):
            try:
                reached += pidfd.send(held.fd, number)
            except PermissionError:
                log.warning("a process may not be signalled pid=%d tag=%s", process.pid, self.marks.tag)
        return reached

    async def changed(self) -> None:
        """Return when another process has ended. The caller gives the deadline."""
        await self._changed.wait()

    async def emptied(self) -> None:
        """Return when nothing that is held lives. The caller gives the deadline."""
        while self._held:
            await self._changed.wait()

    def reap(self) -> None:
        """Take the exits of those that became ours only after their end, when their parent was reaped."""
        for _ in self.known:  # the end of a parent gives us its children, which may stand before it
            for process in filter(self._is_our_zombie, self.known):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)

    @staticmethod
    def _is_our_zombie(process: Process) -> bool:
        stat = proc.read_stat(process.pid)
        return stat is not None and stat.process == process and stat.dead and stat.ppid == os.getpid()

    def close(self) -> None:
        """Let go of everything, alive or not."""
        for held in self._held.values():
            self._let_go(held.fd)
        self._held.clear()

    def _ended(self, process: Process) -> None:
        seen = monotonic_ms()
        held = self._held.pop(process)
        status = pidfd.status(held.fd, process)
        self._let_go(held.fd)
        self.ends[process] = status
        self._changed.set()
        self._changed = anyio.Event()
        self._on_exit(Exit(process, held.role, status, seen))

    @staticmethod
    def _let_go(fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def watch(marked: Marks, processes: Iterable[tuple[Process, Role]], on_exit: Callable[[Exit], None]) -> Tree:
    """A tree that holds those of `processes` that still live, and knows all of them."""
    tree = Tree(marked, on_exit)
    for process, role in processes:
        tree.add(process, role)
    return tree
