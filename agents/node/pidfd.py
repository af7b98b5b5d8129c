"""One process held by a descriptor: signals reach exactly it, its end is an event, its exit status is read.

A pidfd never speaks of another process, whatever becomes of the pid. It is readable once the process has
ended. How it ended is known to its parent alone; for processes that are not our children the status is
read from the zombie before its parent reaps it, and after that from the descriptor (Linux 6.15).
"""

import ctypes
import fcntl
import os
import select
import signal
import struct
from typing import NamedTuple

from relight.agents.node import proc
from relight.events.values import Process

_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


class Status(NamedTuple):
    """How a process ended; both None where nobody could tell."""

    code: int | None = None
    signal: int | None = None


def hold(process: Process) -> int | None:
    """A descriptor of exactly this process, alive or not yet reaped; None where it is gone.

    Raises OSError where the kernel does not tell (no descriptors left, no permission).
    """
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    try:
        stat = proc.read_stat(process.pid)
    except OSError:
        os.close(fd)
        raise
    if stat is None or stat.start != process.start:
        os.close(fd)
        return None
    return fd


def send(fd: int, number: signal.Signals) -> bool:
    """Send a signal; False where the process has ended. Raises PermissionError where it is not ours."""
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    return True


def ended(fd: int) -> bool:
    """Whether the process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def status(fd: int, process: Process) -> Status:
    """How an ended process ended; reaps it where it is our child."""
    try:
        info = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return _others_status(fd, process)
    if info is None:
        return Status()
    if info.si_code == os.CLD_EXITED:
        return Status(code=info.si_status)
    return Status(signal=info.si_status)


def _others_status(fd: int, process: Process) -> Status:
    try:
        stat = proc.read_stat(process.pid)
    except OSError:
        stat = None
    if stat is not None and stat.start == process.start and stat.state == "Z":
        return _split(stat.wait_status)
    info = bytearray(struct.pack("<Q", _PIDFD_INFO_EXIT) + bytes(56))
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
    except OSError:
        return Status()
    if not struct.unpack_from("<Q", info)[0] & _PIDFD_INFO_EXIT:
        return Status()
    return _split(struct.unpack_from("<i", info, 60)[0])


def _split(wait_status: int) -> Status:
    if os.WIFSIGNALED(wait_status):
        return Status(signal=os.WTERMSIG(wait_status))
    return Status(code=os.WEXITSTATUS(wait_status))


def become_subreaper() -> None:
    """Orphans among our descendants become our children, also those that called setsid or daemonised."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
