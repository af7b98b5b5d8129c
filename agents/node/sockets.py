"""Who listens where: TCP sockets of this network namespace, and the processes that hold them."""

import os
import socket
from collections.abc import Iterable
from typing import NamedTuple

from relight.agents.node import proc


class Listener(NamedTuple):
    """A listening TCP socket."""

    host: str
    """`0.0.0.0` and `::` are every address."""
    inode: int


def listeners(port: int) -> list[Listener]:
    """The TCP sockets that listen on `port` in this network namespace."""
    wanted = f":{port:04X}".encode()
    found: list[Listener] = []
    for table in ("net/tcp", "net/tcp6"):
        for line in (proc.read(f"/proc/self/{table}") or b"").splitlines()[1:]:
            fields = line.split()
            if fields[3] == b"0A" and fields[1].endswith(wanted):
                found.append(Listener(_host(fields[1].split(b":")[0].decode()), int(fields[9])))
    return found


def listening_ports(pids: Iterable[int]) -> set[int]:
    """The TCP ports on which these processes listen."""
    ports = {
        int(fields[9]): int(fields[1].rpartition(b":")[2], 16)
        for table in ("net/tcp", "net/tcp6")
        for fields in map(bytes.split, (proc.read(f"/proc/self/{table}") or b"").splitlines()[1:])
        if fields[3] == b"0A"
    }
    return {ports[inode] for pid in pids for inode in sockets(pid) if inode in ports}


def _host(text: str) -> str:

    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def holds_socket(pid: int, inodes: set[int]) -> bool:
    """Whether one of the process's descriptors is one of these sockets."""
    return not inodes.isdisjoint(sockets(pid))


def sockets(pid: int) -> set[int]:
    """The inodes of the sockets that a process has open; empty where that cannot be seen."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return set()
    found: set[int] = set()
    for name in names:
        try:
            link = os.readlink(f"{folder}/{name}")  # noqa: PTH115
        except OSError:
            continue
        if link.startswith("socket:["):
            found.add(int(link[8:-1]))
    return found
