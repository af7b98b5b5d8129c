"""An engine over several nodes: further parts, each a worker that the head's core meets over TCP.

As in vLLM the head is up when every part has come, each iteration needs all of them, and the core dies with
any. A part has a front process, which ends with its worker, and no server.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import NoReturn

from relight.agents.stub.processes import end, spawn
from relight.agents.stub.settings import Settings

_MEET_S = 300.0
"""For the head and the other parts to come; vLLM gives half an hour."""
_RETRY_S = 0.05
_END_S = 1.0


class PartLinks:
    """The core's side: one connection to each further part; none for an engine on one node."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self._done: asyncio.Queue[None] = asyncio.Queue()

    async def gather(self, settings: Settings) -> str:
        """Wait for every further part; what is wrong where they do not come, else nothing."""
        wanted, come = settings.nnodes - 1, asyncio.Event()
        if wanted == 0:
            return ""

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.append(writer)
            if len(self._writers) == wanted:
                come.set()
            with contextlib.suppress(ConnectionError):
                while await reader.read(1):
                    self._done.put_nowait(None)
            os._exit(1)  # as a core does whose collectives cannot go on

        where = f"{settings.master_addr}:{settings.master_port}"
        try:
            self._server = await asyncio.start_server(meet, settings.master_addr, settings.master_port)
            await asyncio.wait_for(come.wait(), _MEET_S)
        except TimeoutError:
            return f"{len(self._writers)} of {wanted} other nodes came to {where} within {_MEET_S:g} s"
        except OSError as error:
            return f"cannot meet the other nodes at {where}: {error}"
        return ""

    async def step(self) -> None:
        """One iteration of all parts: a stopped one holds up everything."""
        for writer in self._writers:
            writer.write(b".")
        for _ in self._writers:
            await self._done.get()


def main(settings: Settings) -> NoReturn:
    """The front process of a further part: as long as its worker lives."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if settings.knobs.ignore_sigterm else _leave)
    if settings.knobs.start_fails:
        sys.stderr.write(f"error: {settings.knobs.start_fails}\n")
        sys.stderr.flush()
        os._exit(1)
    worker: subprocess.Popen[bytes] | None = None
    try:
        worker = spawn(
            "part",
            f"{settings.title}::Worker_TP{settings.node_rank}",
            (),
            *(settings.master_addr, str(settings.master_port)),
            *(str(settings.knobs.orphan_s if settings.knobs.outlives_head else 0.0),),
        )
        worker.wait()
    except SystemExit:
        if worker is not None:
            end(worker, _END_S)
        os._exit(0)
    os._exit(1)


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)


def _work(host: str, port: int, orphan_s: float) -> None:
    """The worker process: meet the head, do each iteration, end with the head."""
    with _met(host, port) as head, contextlib.suppress(ConnectionError):
        os.write(1, f"INFO: joined the head at {host}:{port}\n".encode())
        while head.recv(1):
            head.sendall(b".")
    time.sleep(orphan_s)
    os._exit(1)


def _met(host: str, port: int) -> socket.socket:
    """The connection to the head, which may start later. Raises OSError when it does not come."""
    deadline = time.monotonic() + _MEET_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=None)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _work(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
