"""Snapshots against plain safetensors on the same file system: the same bytes, written and read.

Both sides fsync. Every turn begins with no file of either side in the page cache, and the sides take turns at
going first: at 8 GB the pages of one would be in the way of the other. Each load is done twice, the files
forgotten in between, and the second counts: a virtual machine whose host takes free memory back pays for the
pages themselves at the first. Ours includes the hash of every byte and the check against it; what is compared
is whole seconds, hash and all.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.weights.figures import Figure
from safetensors.numpy import load_file, save_file

from relight.agents import snapshot
from relight.agents.trainer.snapshot import SnapshotSync
from relight.events.version import Version

GB = 10**9
SHARD = 500_000_000
"""Bytes of a shard: a 1 GB model then has two, as large models have many."""
BAR = 0.8
ROUNDS = 4
HASH_BAR = 1.0


def figures(directory: Path, gigabytes: int) -> list[Figure]:
    """Write and load at that size, in turns with plain safetensors; the directory is left empty."""
    size = gigabytes * GB
    free = shutil.disk_usage(directory).free
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 4 * size or memory < 2 * size:
        raise SystemExit(f"{gigabytes} GB need {4 * size} bytes on {directory} and {2 * size} of memory")
    tensors = _model(size)
    plain, ours = directory / "plain", directory / "ours"
    writes, loads = _Turns(), _Turns()
    sides = [
        _Side(writes.plain, loads.plain, partial(_plain, tensors, plain), plain, _load),
        _Side(writes.ours, loads.ours, partial(_ours, tensors, ours), ours / "1.0", _prove_and_load),
    ]
    for turn in range(ROUNDS):
        for side in sides if turn % 2 == 0 else reversed(sides):
            side.writes.append(_seconds(side.write))
            _cold_load(side)
            side.loads.append(_cold_load(side))
            shutil.rmtree(side.place)
    shutil.rmtree(ours)
    at = f"{gigabytes} GB"
    return [
        Figure(f"write {at}", size / statistics.median(writes.ours) / GB, "GB/s"),
        Figure(f"write {at}", writes.share, "of plain bandwidth", BAR, more_is_better=True),
        Figure(f"load {at}", size / statistics.median(loads.ours) / GB, "GB/s"),
        Figure(f"load {at}", loads.share, "of plain bandwidth", BAR, more_is_better=True),
    ]


class _Side(NamedTuple):
    """How one side writes and loads, and where what it took is kept."""

    writes: list[float]
    loads: list[float]
    write: Callable[[], None]
    place: Path
    load: Callable[[Path], int]


class _Turns:
    """Seconds of both sides, in turns, so that what disturbs one disturbs both."""

    def __init__(self) -> None:
        self.plain: list[float] = []
        self.ours: list[float] = []

    @property
    def share(self) -> float:
        """Our bandwidth of the plain one, in the median of the rounds."""
        pairs = zip(self.plain, self.ours, strict=True)
        return statistics.median(plain / ours for plain, ours in pairs)


def hashing() -> Figure:
    """What one core hashes."""
    import hashlib

    data = memoryview(bytearray(os.urandom(1 << 20)) * 256)
    took: list[float] = []
    for _ in range(ROUNDS):
        digest, began = hashlib.sha256(), time.process_time()
        for at in range(0, data.nbytes, 1 << 20):
            digest.update(data[at : at + (1 << 20)])
        took.append(time.process_time() - began)
    return Figure("sha256", data.nbytes / min(took) / GB, "GB/s a core", HASH_BAR, more_is_better=True)


def standing_hold(directory: Path) -> Figure:
    """How long a trainer's thread is held by a recovery of a version whose snapshot stands."""
    sync = SnapshotSync(_model(GB // 10), directory / "standing")
    sync.write(Version(1, 0))
    took: list[float] = []
    for _ in range(50):
        began = time.perf_counter()
        sync.write(Version(1, 0))
        took.append(time.perf_counter() - began)
    sync.close()
    shutil.rmtree(directory / "standing")
    return Figure("hold of a version that stands", statistics.median(took) * 1000.0, "ms", 1.0)


def _model(size: int) -> dict[str, Any]:
    """Tensors of 20 MB, as a layer's of a small model."""
    block = np.random.default_rng(20).integers(0, 1 << 16, size=10_000_000, dtype=np.uint16)
    return {f"layers.{number}.weight": block + np.uint16(number) for number in range(size // block.nbytes)}


def _plain(tensors: dict[str, Any], place: Path) -> None:
    place.mkdir()
    per_file = SHARD // next(iter(tensors.values())).nbytes
    names = list(tensors)
    for number, at in enumerate(range(0, len(names), per_file)):
        path = place / f"{number}.safetensors"
        save_file({name: tensors[name] for name in names[at : at + per_file]}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _ours(tensors: dict[str, Any], place: Path) -> None:
    sync = SnapshotSync(tensors, place, max_shard_bytes=SHARD)
    sync.write(Version(1, 0))
    sync.close()


def _load(place: Path) -> int:
    """Bytes of all tensors, in memory of this process."""
    files = sorted(place.glob("*.safetensors"))
    return sum(array.nbytes for path in files for array in load_file(path).values())


def _prove_and_load(place: Path) -> int:
    snapshot.verify(place)
    return _load(place)


def _forget(place: Path) -> None:
    """Take the files out of the page cache."""
    for path in place.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cold_load(side: _Side) -> float:
    """Seconds of a load from a cold page cache, which is cold again afterwards."""
    _forget(side.place)
    took = _seconds(partial(side.load, side.place))
    _forget(side.place)
    return took


def _seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began
