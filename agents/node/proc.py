"""What the kernel tells of processes: `/proc/PID/stat`, command lines, environments, sockets.

Invariant: a process is named by pid and start time together. Three answers to "does it live": alive, dead
(also a zombie, also a pid that another process has taken), unknown; unknown is proof of nothing.
"""

import errno
import os
import time
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from relight.events.values import Process

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
"""Of `Stat.start`."""
_PROC = "/proc"
_PF_EXITING = 0x4
_GONE = (errno.ENOENT, errno.ESRCH)


class Liveness(Enum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Stat(NamedTuple):
    """One line of `/proc/PID/stat`."""

    pid: int
    ppid: int
    session: int
    state: str
    threads: int
    start: int
    """Clock ticks since the host's boot."""
    flags: int
    """The kernel's PF_… bits."""
    cpu_s: float
    """That it and the children that it has reaped have computed."""
    name: str
    """Of its program, cut at 15 characters."""
    wait_status: int
    """As waitpid(2) gives it; of a zombie only, and where the kernel lets us read it."""

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start)

    @property
    def dead(self) -> bool:
        """A zombie or being removed. A leader that ended before its threads is neither."""
        return self.state in "ZXx" and self.threads <= 1

    @property
    def exiting(self) -> bool:
        """On its way out: killed or in exit(2), though perhaps not yet for others to see."""
        return bool(self.flags & _PF_EXITING)


def read(path: str) -> bytes | None:
    """The file's bytes, or None where its process is gone. Raises OSError where nothing can be told."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    try:
        chunks = b""
        while chunk := os.read(fd, 65536):
            chunks += chunk
        return chunks
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    finally:
        os.close(fd)


def read_stat(pid: int) -> Stat | None:
    """The process that has `pid` now, or None. Raises OSError where the kernel does not tell."""
    line = read(f"{_PROC}/{pid}/stat")
    if not line:
        return None
    fields = line[line.rindex(b")") + 2 :].split()
    return Stat(
        pid=pid,
        ppid=int(fields[1]),
        session=int(fields[3]),
        state=fields[0].decode(),
        threads=int(fields[17]),
        start=int(fields[19]),
        flags=int(fields[6]),
        cpu_s=sum(map(int, fields[11:15])) / TICKS_A_SECOND,
        name=line[line.index(b"(") + 1 : line.rindex(b")")].decode(errors="replace"),
        wait_status=int(fields[49]) if len(fields) > 49 else 0,
    )


def liveness(process: Process) -> Liveness:
    """Whether exactly this process lives."""
    try:
        stat = read_stat(process.pid)
        if stat is None and not Path(_PROC, "self").exists():
            return Liveness.UNKNOWN
    except OSError:
        return Liveness.UNKNOWN
    if stat is None or stat.start != process.start or stat.dead:
        return Liveness.DEAD
    return Liveness.ALIVE


def is_exiting(process: Process) -> bool:
    """Whether exactly this process is on its way out or gone; False where the kernel does not tell."""
    try:
        stat = read_stat(process.pid)
    except OSError:
        return False
    return stat is None or stat.start != process.start or stat.exiting


def all_stats() -> dict[int, Stat]:
    """Every process that can be seen, by pid; about 15 µs each."""
    found: dict[int, Stat] = {}
    for name in os.listdir(_PROC):  # noqa: PTH208 -- ten times a second, of names only
        if name.isdigit():
            try:
                stat = read_stat(int(name))
            except OSError:
                continue
            if stat is not None:
                found[stat.pid] = stat
    return found


def ticks_now() -> float:
    """Clock ticks since the host's boot, as `Stat.start` counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_A_SECOND


def ancestors(pid: int) -> set[int]:
    """`pid` and everything above it."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        stat = read_stat(pid)
        pid = stat.ppid if stat else 0
    return found


def command_line(pid: int) -> str:
    """Arguments, or the title that replaced them, joined by spaces; empty where it cannot be read."""
    try:
        return (read(f"{_PROC}/{pid}/cmdline") or b"").replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def environment(pid: int) -> frozenset[bytes]:
    """The `NAME=value` strings that the process was started with, as far as they can still be read."""
    try:
        return frozenset((read(f"{_PROC}/{pid}/environ") or b"").split(b"\0"))
    except OSError:
        return frozenset()


def host_boot() -> str:
    """The kernel's random id of this boot: pids and start times mean nothing under another one."""
    return Path(_PROC, "sys/kernel/random/boot_id").read_text().strip()


def memory_maps(pid: int) -> bytes:
    """`/proc/PID/maps`, empty where it cannot be read."""
    try:
        return read(f"{_PROC}/{pid}/maps") or b""
    except OSError:
        return b""


def oom_kills() -> int | None:
    """Kills for lack of memory that the kernel has counted; None where it does not tell."""
    try:
        for line in (read(f"{_PROC}/vmstat") or b"").splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    except OSError:
        return None
    return None
