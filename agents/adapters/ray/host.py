"""The agent's process on a Ray node, started by a holder and outliving it.

`python -m relight.agents.adapters.ray.host FOLDER` reads `host.json` there. It ends on SIGTERM, and with its
raylet, whose end means that nothing is reserved for it here any more; both stop the engines, proven. A
second one of the same folder ends at once.
"""

import fcntl
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path

import anyio
import msgspec

from relight.agents.node import agent, pidfd, proc
from relight.agents.node.config import NodeFile
from relight.agents.node.hurry import Hurry
from relight.agents.node.record import write
from relight.events import codec
from relight.events.errors import RelightError, leaves
from relight.events.values import Process

log = logging.getLogger(__name__)

BUS = "RELIGHT_BUS_URL"
"""Told by the environment: a URL may hold a password."""
FILE, HOST, LOCK, LOG = "node.json", "host.json", "host.lock", "agent.log"
DONE, REFUSED = 0, 2
NOBODY = Process(0, 0)


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Which process is the agent of a folder, and on whose behalf."""

    process: Process
    raylet: Process


def read(folder: Path) -> Host | None:
    """Who was started last there."""
    try:
        return codec.from_json((folder / HOST).read_bytes(), Host)
    except FileNotFoundError:
        return None


def me() -> Process:
    stat = proc.read_stat(os.getpid())
    assert stat is not None
    return stat.process


async def raylet_ended(raylet: Process) -> None:
    """Return when it has, at once where it is gone."""
    fd = pidfd.hold(raylet) if raylet != NOBODY else None
    if fd is not None:
        try:
            await anyio.wait_readable(fd)
        finally:
            os.close(fd)
    log.warning("the raylet has ended, and with it what was reserved here pid=%d", raylet.pid)


async def serve(file: NodeFile, raylet: Process, *, bus_url: str) -> None:
    """The agent, until SIGTERM or the raylet's end."""
    hurry = Hurry()
    asked = anyio.Event()

    async def signals() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as numbers:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            async for _ in numbers:
                if asked.is_set():
                    hurry.set()
                asked.set()

    async def raylet_watched() -> None:
        await raylet_ended(raylet)
        asked.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(signals)
        tasks.start_soon(raylet_watched)
        await agent.serve(file, bus_url=bus_url, stop_engines=True, hurry=hurry, until=asked.wait)
        tasks.cancel_scope.cancel()


def main(folder: Path) -> int:
    """Be the agent of `folder`; the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("another one is the agent of %s", folder)
        return REFUSED
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to hear it
    before = read(folder)
    raylet = _parent_raylet() or (before.raylet if before else NOBODY)
    write(folder / HOST, codec.to_json(Host(process=me(), raylet=raylet)).encode())
    file = codec.from_json((folder / FILE).read_bytes(), NodeFile)
    try:
        anyio.run(partial(serve, file, raylet, bus_url=os.environ[BUS]))
    except (RelightError, BaseExceptionGroup) as error:
        causes = leaves(error)
        if not all(isinstance(cause, RelightError) for cause in causes):
            raise
        log.error("%s", "; ".join(str(cause) for cause in causes))
        return REFUSED
    return DONE


RAYLET = "RELIGHT_RAYLET"
"""PID and start time of the raylet for which the process is started; none to clean up after one."""


def _parent_raylet() -> Process | None:
    told = os.environ.get(RAYLET)
    if told is None:
        return None
    pid, start = told.split()
    return Process(int(pid), int(start))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
