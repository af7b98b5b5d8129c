"""Writing a snapshot's files: safetensors shards, hashed while they are written.

The format is written by hand (eight bytes of length, a JSON header, the bytes of each tensor in a row) so
that the very buffers that go to the file are hashed by a second thread at the same time: no byte is copied
once more or read back, and the hash is of what was handed over, not of what the disk made of it. A shard is
hashed and synced while the next one is written.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from relight.agents.snapshot import File, hashed
from relight.agents.trainer.tensors import Named, width
from relight.events import codec

ALIGNMENT = 8
IN_MEMORY = 2
"""Shards at a time whose bytes are held in host memory: one is written, the one before it still hashed."""
WRITE_BYTES = 1 << 20
"""Largest single write. Of 16 MB each they took three times as long on ext4, hashed or not."""

INDEX = "model.safetensors.index.json"


def plan(tensors: Sequence[Named], max_shard_bytes: int) -> list[list[Named]]:
    """Tensors in shards of at most `max_shard_bytes`, unless one alone is larger. Never empty."""
    shards: list[list[Named]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.size > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size
    return shards


def names(count: int) -> list[str]:
    """The names under which Hugging Face loaders look for that many shards."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write(
    directory: Path, tensors: Sequence[Named], *, max_shard_bytes: int, go: Callable[[], None]
) -> list[File]:
    """Write the shards and their index into `directory`, each fsynced; raises OSError.

    `go` is called before the bytes of each shard are taken.
    """
    shards = plan(tensors, max_shard_bytes)
    files: list[File] = []
    hashing: deque[Future[File]] = deque()
    syncs: list[Future[None]] = []
    with ThreadPoolExecutor(IN_MEMORY + 1, thread_name_prefix="relight-shards") as pool:
        for name, shard in zip(names(len(shards)), shards, strict=True):
            if len(hashing) == IN_MEMORY:
                files.append(hashing.popleft().result())
            go()
            hashing.append(_write_shard(directory / name, shard, pool))
            syncs.append(pool.submit(_sync_file, directory / name))
        files += [each.result() for each in hashing]
        for each in syncs:
            each.result()
    if len(shards) > 1:
        files.append(_write_index(directory / INDEX, shards))
    return files


def _write_shard(path: Path, shard: Sequence[Named], pool: ThreadPoolExecutor) -> "Future[File]":
    # Wide dtypes first: every tensor then lies at a multiple of its own width.
    ordered = sorted(shard, key=lambda tensor: -width(tensor.form.dtype))
    pieces = [memoryview(header(ordered)), *(tensor.data() for tensor in ordered)]
    hashed = pool.submit(_hashed, path.name, pieces)
    with path.open("xb", buffering=0) as file:
        for piece in pieces:
            write_all(file.fileno(), piece)
    return hashed


def header(tensors: Sequence[Named]) -> bytes:
    """The length and the JSON header of a file that holds `tensors` in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.form.dtype,
            "shape": list(tensor.form.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = codec.to_json(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_all(descriptor: int, data: memoryview) -> None:
    """Write every byte of `data`; raises OSError."""
    for piece in _cut(data):
        rest = piece
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _hashed(name: str, pieces: Sequence[memoryview]) -> File:
    digest = hashlib.sha256()
    for piece in pieces:
        for part in _cut(piece):
            digest.update(part)
    return File(name, sum(piece.nbytes for piece in pieces), digest.hexdigest())


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, WRITE_BYTES):
        yield data[start : start + WRITE_BYTES]


def _write_index(path: Path, shards: Sequence[Sequence[Named]]) -> File:
    files = zip(names(len(shards)), shards, strict=True)
    index = {
        "metadata": {"total_size": sum(tensor.size for shard in shards for tensor in shard)},
        "weight_map": {tensor.name: name for name, shard in files for tensor in shard},
    }
    write_durably(path, codec.to_json(index).encode())
    return hashed(path)


def write_durably(path: Path, data: bytes) -> None:
    """A new file with `data` in it, fsynced; raises OSError."""
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(data))
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make names in `path` durable; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
