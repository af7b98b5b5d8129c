"""What a snapshot of an engine's model costs: its bytes, and the seconds that writing and proving it take.

Rates are measured where they are asked for: reading and hashing on the model's own files, writing on the
directory of the snapshots.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

from relight.agents.snapshot import WEIGHTS, hashed
from relight.events.errors import UsageError

PROBE_BYTES = 128 << 20
"""Written to measure a directory: more than most write caches smooth away, a second of a slow disk."""


class Snapshot(NamedTuple):
    """One version's."""

    bytes: int
    proof_s: float
    """For an agent to read and hash it with one core, before each load and each start on it."""
    write_s: float | None
    """For the trainer, which is held meanwhile; None where no directory was named."""


def snapshot_of(model: Path, directory: Path | None) -> Snapshot | None:
    """That of the model in `model`; None where it holds no weights. Raises UsageError for the directory."""
    files = [path for path in sorted(model.iterdir()) if path.suffix in WEIGHTS]
    if not files:
        return None
    size = sum(path.stat().st_size for path in files)
    smallest = min(files, key=lambda path: path.stat().st_size)
    began = time.perf_counter()
    read = max(hashed(smallest).size, 1)
    a_byte_s = (time.perf_counter() - began) / read
    written = None if directory is None else size * _write_a_byte_s(directory)
    return Snapshot(size, round(size * a_byte_s, 3), None if written is None else round(written, 3))


def _write_a_byte_s(directory: Path) -> float:
    """Seconds for each byte that is written there and synced."""
    probe = directory / f".relight-probe-{os.getpid()}"
    block = os.urandom(1 << 20)
    try:
        began = time.perf_counter()
        with probe.open("xb", buffering=0) as file:
            for _ in range(PROBE_BYTES >> 20):
                file.write(block)
            os.fsync(file.fileno())
        return (time.perf_counter() - began) / PROBE_BYTES
    except OSError as error:
        raise UsageError(f"snapshots' directory {directory}: {error.strerror}") from error
    finally:
        probe.unlink(missing_ok=True)
