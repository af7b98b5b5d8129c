"""What an engine has made for the calls under way, in a file that outlives the process that writes it.

The engine's actor is killed with its engine, and with it all that it would have answered. So each token is
appended to a file in the same turn of the event loop; who holds the calls reads it once the actor is gone.
Records are msgpack, each behind its length; a record that was cut off at the end is none.
"""

import asyncio
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

COMPACT_BYTES = 32 << 20
"""From that size on only calls that are under way are kept, in a file that takes the first one's place."""
_LENGTH = struct.Struct("<I")


class _Record(msgspec.Struct, frozen=True, array_like=True):
    request: str
    tokens: list[int]
    logprobs: list[float] | None
    ended: bool = False


class Kept(msgspec.Struct, kw_only=True):
    """The tokens of one call so far, as they were sampled."""

    tokens: list[int] = []
    logprobs: list[float] | None = None
    """One for each token; None where none were asked for."""

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        self.tokens.extend(tokens)
        if logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(logprobs)


_decoder = msgspec.msgpack.Decoder(_Record)
_encoder = msgspec.msgpack.Encoder()


class Ledger:
    """The writing side, used in one event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = _opened(path)
        self._size = 0
        self._live: dict[str, Kept] = {}
        self._unwritten: list[bytes] = []

    def begin(self, request: str) -> None:
        self._live[request] = Kept()
        self._append(_Record(request, [], None))

    def add(self, request: str, tokens: list[int], logprobs: list[float] | None) -> None:
        """New tokens of a call that has begun."""
        self._live[request].add(tokens, logprobs)
        self._append(_Record(request, tokens, logprobs))

    def end(self, request: str) -> None:
        del self._live[request]
        self._append(_Record(request, [], None, True))

    def close(self) -> None:
        self._write()
        os.close(self._fd)

    def _append(self, record: _Record) -> None:
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten.append(_framed(record))

    def _write(self) -> None:
        if not self._unwritten:
            return
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        self._size += _all_written(self._fd, data)
        if self._size > COMPACT_BYTES:
            self._compact()

    def _compact(self) -> None:
        beside = self._path.with_suffix(".new")
        fd = _opened(beside)
        live = (_Record(request, kept.tokens, kept.logprobs) for request, kept in self._live.items())
        self._size = _all_written(fd, b"".join(map(_framed, live)))
        beside.replace(self._path)
        os.close(self._fd)
        self._fd = fd


def read(path: Path) -> dict[str, Kept]:
    """The calls that had not ended, by request. Raises OSError."""
    live: dict[str, Kept] = {}
    for record in _records(path.read_bytes()):
        if record.ended:
            live.pop(record.request, None)
        elif not record.tokens:
            live[record.request] = Kept()
        else:
            live.setdefault(record.request, Kept()).add(record.tokens, record.logprobs)
    return live


def _records(data: bytes) -> Iterator[_Record]:
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield _decoder.decode(data[at : at + length])
        at += length


def _framed(record: _Record) -> bytes:
    body = _encoder.encode(record)
    return _LENGTH.pack(len(body)) + body


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _all_written(fd: int, data: bytes) -> int:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    return len(data)
