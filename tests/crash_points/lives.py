"""A service manager in small: it starts commands, starts a killed one again at once, and notes every end."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from relight.orchestrator.cli.demo import processes

OURS: set[int] = set()
"""Children that somebody here waits for; every other zombie is an orphan's."""
REAP_S = 0.2
STOP_S = 30.0


class Life(NamedTuple):
    pid: int
    code: int


class Service:
    """One command, and the processes that run it one after another."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, env: dict[str, str]) -> None:
        self.name = name
        self.lives: list[Life] = []
        """Those that ended."""
        self.began_ms = 0
        """Unix time at which the present life began."""
        self._command = command
        self._log = log
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._ended = anyio.Event()

    def start(self, tasks: TaskGroup, *, again: bool = True, fds: Sequence[int] = ()) -> None:
        """Run it; `again`: for as long as nobody stops it."""
        self._spawn(fds)
        tasks.start_soon(self._watch, again)

    def _spawn(self, fds: Sequence[int] = ()) -> None:
        self.began_ms = int(time.time() * 1000)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._env,
                pass_fds=fds,
                start_new_session=True,
            )
        OURS.add(self._process.pid)

    @property
    def pid(self) -> int:
        """Of the present life."""
        assert self._process is not None
        return self._process.pid

    async def _watch(self, again: bool) -> None:
        while True:
            process = self._process
            assert process is not None and process.stdin is not None
            fd = os.pidfd_open(process.pid)
            try:
                await anyio.wait_readable(fd)
            finally:
                os.close(fd)
            self.lives.append(Life(process.pid, process.wait()))
            process.stdin.close()
            OURS.discard(process.pid)
            if self._stopping or not again:
                self._ended.set()
                return
            self._spawn()

    async def stop(self) -> None:
        """End it in its own way; raises TimeoutError where it does not."""
        self._stopping = True
        assert self._process is not None
        self._process.terminate()
        with anyio.fail_after(STOP_S):
            await self._ended.wait()

    def kill(self) -> None:
        """End it where it stands; it is not started again."""
        self._stopping = True
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait(STOP_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        OURS.discard(self._process.pid)


async def reap() -> None:
    """Take the exits of adopted orphans, as an init would."""
    while True:
        await anyio.sleep(REAP_S)
        processes.reap(OURS)
