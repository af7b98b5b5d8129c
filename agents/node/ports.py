"""Ports of engines: free ones, and the proof that one is free again.

They are taken from below the range of outgoing connections: no connection of anybody can sit on one by
chance, and a connection attempt to one cannot meet itself. A port that was used rests for a while.
"""

import errno
import random
import socket
from collections.abc import Container, Iterator
from pathlib import Path

from relight.events.errors import RelightError

LOWEST = 15_000
QUARANTINE_S = 60.0
"""A client that missed a fence for so long has long been told; a late reply cannot reach a successor."""


class NoPort(RelightError):
    """No port is free."""


def bindable(port: int) -> bool:
    """Whether a server could listen on `port` on every address now."""
    for kind, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 -- never listened on
        try:
            with socket.socket(kind, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if kind == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return True


def pick(refused: Container[int]) -> int:
    """A port that can be bound now and is not `refused`; raises NoPort."""
    for port in _candidates():
        if port not in refused and bindable(port):
            return port
    raise NoPort(f"no port from {LOWEST} up outside the range of outgoing connections is free")


def _candidates() -> Iterator[int]:
    low, high = outgoing()
    span = range(LOWEST, low) if low - LOWEST >= 1000 else range(high + 1, 65_536)
    if len(span) < 100:
        span = range(LOWEST, 65_536)
    yield from random.sample(span, len(span))


def outgoing() -> tuple[int, int]:
    """The first and the last port that the kernel gives to outgoing connections."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there. For this machine's own addresses: it does not wait for a network."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("::" if ":" in host else "0.0.0.0", 0))  # noqa: S104
        if probe.getsockname()[1] == port:
            return False
        probe.setblocking(False)
        if probe.connect_ex((host, port)) not in (0, errno.EINPROGRESS):
            return False
        try:
            return bool(probe.getpeername()[1] == port)
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                return False
            raise
