"""What outlives a demo that is killed: it stops the demo's services in order, and then ends itself.

Started before everything else, it is told of each service on its standard input. While the demo lives it
does nothing; when its input ends without a farewell, the demo is gone. A parent-death signal would not do:
the kernel may send it once for each thread of the dead parent, and a second SIGTERM means `at once`.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from relight.events.values import Process
from relight.orchestrator.cli.demo import processes

FAREWELL = b"farewell\n"
STOP_S = 60.0
"""Longest wait for a service's end after SIGTERM, then SIGKILL."""


class Guard:
    """The demo's hold on its guard."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def note(self, process: Process) -> None:
        """Tell it of a service; the one told last is stopped first."""
        self._say(msgspec.json.encode((process, "started")) + b"\n")

    def stopping(self, process: Process) -> None:
        """Tell it that a service was asked to end: it is not to ask again."""
        self._say(msgspec.json.encode((process, "stopping")) + b"\n")

    def dismiss(self) -> None:
        """There is nothing to guard any more; returns when it has ended."""
        self._say(FAREWELL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(STOP_S)

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)


def keep(lines: Iterable[bytes], folder: Path) -> None:
    """Guard until the farewell; without one, stop every service and remove the demo's folder."""
    told: dict[Process, Literal["started", "stopping"]] = {}
    for line in lines:
        if line == FAREWELL:
            return
        process, state = msgspec.json.decode(line, type=tuple[Process, Literal["started", "stopping"]])
        told[process] = state
    for process, state in reversed(told.items()):
        _stop(process, ask=state == "started")
    shutil.rmtree(folder, ignore_errors=True)


def _stop(process: Process, *, ask: bool) -> None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not processes.alive(process):
                return
            if ask or number is signal.SIGKILL:
                signal.pidfd_send_signal(fd, number)
            select.select([fd], [], [], STOP_S)
    except ProcessLookupError:
        return
    finally:
        os.close(fd)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    keep(sys.stdin.buffer, Path(sys.argv[1]))
