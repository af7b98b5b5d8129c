"""What the demo's processes were seen to hold, and what of it is still there at the end."""

import os
import select
import signal
import socket
from collections.abc import Iterable
from pathlib import Path

from relight.events.values import Process
from relight.orchestrator.cli.demo import processes
from relight.orchestrator.cli.demo.evidence import Left, Looked

CLEARINGS = 10
"""Rounds of killing: one that dies may have started another meanwhile."""
KILL_S = 5.0
"""Longest wait for the end of a process that got SIGKILL."""


class Inventory:
    """Everything seen so far. Descendants that were there before the demo are not its own."""

    def __init__(self) -> None:
        self._others = frozenset(processes.descendants(os.getpid()))
        self._processes: set[Process] = set()
        self._ports: set[int] = set()
        self._segments: set[str] = set()
        self._scratch: set[str] = set()

    def note(self, seen: Iterable[Process], *, address: str) -> None:
        """Note an engine's processes and what they hold now, and the port in its address."""
        alive = processes.living(seen)
        self._processes |= set(alive)
        self._ports.add(port_of(address))
        self._segments |= processes.segments(alive)
        self._scratch |= processes.scratch(alive)

    def note_service(self, process: Process) -> None:
        """Note a process of relight's own."""
        self._processes.add(process)

    def note_port(self, url: str) -> None:
        """Note the port in a URL."""
        self._ports.add(port_of(url))

    @property
    def looked(self) -> Looked:
        """How much there is to look for."""
        return Looked(
            processes=len(self._processes),
            ports=len(self._ports),
            segments=len(self._segments),
            scratch=len(self._scratch),
        )

    def left(self, folder: Path) -> Left:
        """What is still there; `folder` is the temporary folder of all services."""
        known = [*self._descendants(), *processes.living(self._processes)]
        folders = [path for path in self._scratch if Path(path).exists() and Path(path) != folder]
        return Left(
            processes=tuple(
                f"{process.pid} {processes.title(process.pid)[:60]}" for process in sorted(set(known))
            ),
            ports=tuple(port for port in sorted(self._ports) if not _free(port)),
            segments=processes.standing(self._segments),
            scratch=tuple(sorted([*folders, *(str(path) for path in folder.iterdir())])),
        )

    def clear(self) -> None:
        """Kill what still runs of the demo's own descendants, by identity; for the end of a failed demo."""
        for _ in range(CLEARINGS):
            for process in self._descendants():
                _kill(process)
            processes.reap(())

    def _descendants(self) -> list[Process]:
        return [process for process in processes.descendants(os.getpid()) if process not in self._others]


def _kill(process: Process) -> None:
    """SIGKILL to exactly this process; returns when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if processes.alive(process):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], KILL_S)
    except ProcessLookupError:
        return
    finally:
        os.close(fd)


def port_of(url: str) -> int:
    """The port at the end of `scheme://HOST:PORT`."""
    return int(url.rpartition(":")[2])


def _free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True
