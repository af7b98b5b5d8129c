"""A small program of the agent's own beside it: started in a session of its own, reaped, never an engine.

It outlives the agent, so it ends by itself, and it uses the standard library alone, so that it starts in a
few milliseconds.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio


class Helper:
    """One that was started here."""

    def __init__(
        self, program: Path, arguments: Sequence[str], *, env: Mapping[str, str], stdin: int | None = None
    ) -> None:
        """Start it, with the descriptor `stdin` as its input. Raises OSError."""
        given = (
            (os.POSIX_SPAWN_DUP2, stdin, 0)
            if stdin is not None
            else (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        )
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(program), *arguments],
            env,
            file_actions=[
                given,
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setsid=True,
        )
        self._fd = os.pidfd_open(pid)
        self._ended = anyio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._reap)

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.is_set()

    async def ended(self) -> None:
        """Return when it has ended. The caller gives the deadline."""
        await self._ended.wait()

    def close(self) -> None:
        """Let go of it; it lives on."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _reap(self) -> None:
        os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
        self.close()
        self._ended.set()
