"""An engine's output: where it lies, the process that writes it, and its last lines."""

import os
from pathlib import Path

from relight.agents.node.helper import Helper

LIMIT_BYTES = 32 << 20
"""Each of the two files of one incarnation: hours of vLLM's ordinary output."""

TAIL_BYTES = 64 << 10
LINE_CHARS = 400

_PROGRAM = Path(__file__).with_name("pump.py")


class Pump:
    """A pump that was started here. It is reaped when it ends, also where nobody asks for it any more."""

    def __init__(self, path: Path) -> None:
        """Start it into `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        reading, self.writing = os.pipe2(os.O_CLOEXEC)
        try:
            self._helper = Helper(_PROGRAM, [str(path), str(LIMIT_BYTES)], env={}, stdin=reading)
        except OSError:
            self.handed_over()
            raise
        finally:
            os.close(reading)

    def handed_over(self) -> None:
        """The engine has its copy of the pipe's end; without ours the pump ends with the engine."""
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    async def ended(self) -> None:
        """Return when everything is written. The caller gives the deadline."""
        await self._helper.ended()

    def close(self) -> None:
        """Let go of it."""
        self.handed_over()
        self._helper.close()


def last_lines(path: Path, count: int) -> list[str]:
    """The newest lines without their times, each cut to `LINE_CHARS`; empty where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()[-count:]
    except FileNotFoundError:
        return []
    return [line.partition(b" ")[2].decode(errors="replace")[:LINE_CHARS] for line in lines]
