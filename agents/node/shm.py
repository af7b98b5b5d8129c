"""Shared-memory segments of an engine: recorded while its processes live, removed once they are gone.

Names in /dev/shm tell no owner. A segment is the engine's when one of its processes maps it and it was made
after the engine was started; it is removed only when the kernel says that nobody has it open any more (a
write lease is refused for a file that somebody holds). Semaphores are mapped under a name that is gone by
then, so files are known by inode.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from relight.agents.node import proc
from relight.events.values import Process

_FOLDER = "/dev/shm"  # noqa: S108 -- looked at, and only what is proven ours is removed
_MAPPED = re.compile(rb"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/", re.MULTILINE)


class Segment(NamedTuple):
    path: str
    inode: int


def mapped_by(processes: Iterable[Process], *, since_ns: int) -> set[Segment]:
    """The segments that these processes map and that were made at or after `since_ns` (Unix time)."""
    inodes = {
        int(match[1]) for process in processes for match in _MAPPED.finditer(proc.memory_maps(process.pid))
    }
    if not inodes:
        return set()
    with os.scandir(_FOLDER) as entries:
        found = {Segment(entry.path, entry.inode()) for entry in entries if entry.inode() in inodes}
    return {segment for segment in found if _made_after(segment, since_ns)}


def _made_after(segment: Segment, since_ns: int) -> bool:
    try:
        made = os.stat(segment.path, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return False
    return made.st_ino == segment.inode and made.st_ctime_ns >= since_ns


def remove(segments: Iterable[Segment]) -> list[str]:
    """Remove those that nobody uses; the paths of those that somebody else still has open."""
    return [segment.path for segment in segments if not _removed(segment)]


def _removed(segment: Segment) -> bool:
    try:
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        if os.fstat(fd).st_ino != segment.inode:
            return True
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return False
        os.unlink(segment.path)  # noqa: PTH108
        return True
    finally:
        os.close(fd)
