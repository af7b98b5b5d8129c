"""What the kernel says of processes: who lives, who descends from whom, what they map and where they write.

A process is named by pid and start time, so a reused pid is another one; a zombie is dead. Everything is
read from /proc here, by the demo itself, and asks nothing that relight recorded.
"""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from relight.events.values import Process

_PROC = Path("/proc")
_SHM = "/dev/shm/"  # noqa: S108 the place is the point
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants, so that none can get away."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None where there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def named(pid: int) -> Process | None:
    """The living process with this pid; None for none and for a zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return Process(pid, int(fields[19]))


def alive(process: Process) -> bool:
    """Whether this very process lives."""
    return named(process.pid) == process


def living(processes: Iterable[Process]) -> tuple[Process, ...]:
    """Those of `processes` that live, in order."""
    return tuple(sorted({process for process in processes if alive(process)}))


def title(pid: int) -> str:
    """The command line or title of a process, one space between arguments; empty where it is gone."""
    try:
        return (
            (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parent(pid: int) -> int | None:
    """The pid of its parent; None where it is gone."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def descendants(root: int) -> tuple[Process, ...]:
    """Every living process below `root`, by parent."""
    children: dict[int, list[Process]] = {}
    dead: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields is None:
            continue
        pid, above = int(entry.name), int(fields[1])
        if fields[0] in "ZX":
            dead.setdefault(above, []).append(pid)
        else:
            children.setdefault(above, []).append(Process(pid, int(fields[19])))
    found: list[Process] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found += children.get(pid, [])
        waiting += [child.pid for child in children.get(pid, [])] + dead.get(pid, [])
    return tuple(sorted(found))


def segments(processes: Iterable[Process]) -> frozenset[str]:
    """Names under /dev/shm that these processes map."""
    found: set[str] = set()
    for process in processes:
        try:
            lines = (_PROC / str(process.pid) / "maps").read_text(errors="replace").splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        mapped = [line.split(maxsplit=5)[-1] for line in lines if _SHM in line]
        found |= {path.removeprefix(_SHM) for path in mapped if path.startswith(_SHM)}
    return frozenset(name for name in found if not name.endswith(" (deleted)"))


def standing(names: Iterable[str]) -> tuple[str, ...]:
    """Those of these names that still stand under /dev/shm."""
    return tuple(sorted(name for name in names if Path(_SHM, name).exists()))


def scratch(processes: Iterable[Process]) -> frozenset[str]:
    """The folders that these processes were given as TMPDIR or for vLLM's sockets."""
    wanted = (b"TMPDIR=", b"VLLM_RPC_BASE_PATH=")
    found: set[str] = set()
    for process in processes:
        try:
            environment = (_PROC / str(process.pid) / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found |= {os.fsdecode(pair.partition(b"=")[2]) for pair in environment if pair.startswith(wanted)}
    return frozenset(found - {""})


def reap(ours: Iterable[int]) -> None:
    """Take the exit of adopted orphans; `ours` are children that somebody else waits for."""
    kept = set(ours)
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) in kept:
            continue
        fields = _stat(int(entry.name))
        if fields is not None and fields[0] == "Z" and int(fields[1]) == os.getpid():
            try:
                os.waitpid(int(entry.name), os.WNOHANG)
            except ChildProcessError:
                continue
