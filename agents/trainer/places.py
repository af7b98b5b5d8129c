"""Whether what is written to a directory can be read on another machine, as far as this one can tell.

Agents prove it again: one that does not find the bytes of the digest refuses to load them.
"""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from relight.events.values import Member

LOCAL = frozenset(
    {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs", "bcachefs", "jfs"}
)
"""File systems that one machine sees, unless it is told to export them; others are believed to be shared."""


def elsewhere(members: Iterable[Member]) -> list[Member]:
    """Members that do not listen on this machine."""
    return [member for member in members if not _is_here(urlsplit(member.address).hostname or "")]


def file_system(directory: Path) -> str:
    """The type of the file system that `directory`, or what stands above it, is on; empty where unknown."""
    path = directory
    while not path.exists() and path != path.parent:
        path = path.parent
    path = path.resolve()
    best, kind = -1, ""
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            left, _, right = line.partition(" - ")
            point = Path(left.split(" ")[4].encode().decode("unicode_escape"))
            if path.is_relative_to(point) and len(point.parts) >= best:
                best, kind = len(point.parts), right.split(" ")[0]
    return kind


@lru_cache(maxsize=1024)
def _is_here(host: str) -> bool:
    """Whether `host` names an address of this machine; also where nobody knows it: agents will tell."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return True
    return any(_is_ours(family, str(address[0])) for family, _, _, _, address in found)


def _is_ours(family: socket.AddressFamily, address: str) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def told(directory: Path, members: Iterable[Member]) -> str | None:
    """Why these members cannot read `directory`; None where they may."""
    kind = file_system(directory)
    if kind not in LOCAL:
        return None
    away = elsewhere(members)
    if not away:
        return None
    names = ", ".join(f"{member.engine} ({member.address})" for member in away[:3])
    more = f" and {len(away) - 3} more" if len(away) > 3 else ""
    return (
        f"{os.fspath(directory)} is on {kind}, which only this machine reaches, and {names}{more} run"
        " elsewhere: give a directory on a shared file system, or shared=True where this one is"
    )
