"""relight's own commands as processes, for the length of a block."""

import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

RELIGHT = (sys.executable, "-m", "relight.orchestrator.cli")
STOP_S = 120.0
"""An agent stops its engines within it."""


@contextmanager
def running(command: Sequence[str], log: Path) -> Generator["subprocess.Popen[bytes]"]:
    """One command, stopped by SIGTERM at the end of the block, and killed where that does not help."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
