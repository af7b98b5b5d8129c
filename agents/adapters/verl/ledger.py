"""What an engine has made for the calls under way, in a file that outlives the process that writes it.

The engine's actor is killed with its engine, and with it all that it would have answered. So each token is
appended to a file in the same turn of the event loop; who holds the calls reads it once the actor is gone.
A call that has ended stays for a while: its answer is not yet with who asked, and may die with the actor.
Records are msgpack, each behind its length; a record that was cut off at the end is none.
"""

import asyncio
import os
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

COMPACT_BYTES = 32 << 20
"""From that size on only what may be asked for is kept, in a file that takes the first one's place."""
ANSWERED_S = 60.0
"""By then the answer of a call that has ended is with who asked for it."""
_LENGTH = struct.Struct("<I")


class _Record(msgspec.Struct, frozen=True, array_like=True):
    request: str
    tokens: list[int]
    logprobs: list[float] | None
    ended: bool = False
    finish: str | None = None


class Kept(msgspec.Struct, kw_only=True):
    """The tokens of one call so far, as they were sampled."""

    tokens: list[int] = []
    logprobs: list[float] | None = None
    """One for each token; None where none were asked for."""
    ended: bool = False
    """No more came; whether the answer arrived is not known here."""
    finish: str | None = None
    """The engine's finish reason; None where it gave none."""

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
        self._most = COMPACT_BYTES
        self._calls: dict[str, Kept] = {}
        self._ended: deque[tuple[float, str, Kept]] = deque()
        """The calls that have ended, with the monotonic time at which they did."""
        self._unwritten: list[bytes] = []

    def begin(self, request: str) -> None:
        self._calls[request] = Kept()
        self._append(_Record(request, [], None))

    def add(self, request: str, tokens: list[int], logprobs: list[float] | None) -> None:
        """New tokens of a call that has begun."""
        self._calls[request].add(tokens, logprobs)
        self._append(_Record(request, tokens, logprobs))

    def end(self, request: str, finish: str | None) -> None:
        """No more comes; `finish`: the engine's finish reason, where there is one."""
        kept, now = self._calls[request], time.monotonic()
        kept.ended, kept.finish = True, finish
        self._append(_Record(request, [], None, ended=True, finish=finish))
        self._ended.append((now, request, kept))
        while self._ended and now - self._ended[0][0] > ANSWERED_S:
            _, old, left = self._ended.popleft()
            if self._calls.get(old) is left:
                del self._calls[old]

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
        if self._size > self._most:
            self._compact()

    def _compact(self) -> None:
        beside = self._path.with_suffix(".new")
        fd = _opened(beside)
        records = [_Record(request, kept.tokens, kept.logprobs) for request, kept in self._calls.items()]
        records += [
            _Record(request, [], None, ended=True, finish=kept.finish)
            for request, kept in self._calls.items()
            if kept.ended
        ]
        self._size = _all_written(fd, b"".join(map(_framed, records)))
        self._most = max(COMPACT_BYTES, 2 * self._size)
        beside.replace(self._path)
        os.close(self._fd)
        self._fd = fd


def read(path: Path) -> dict[str, Kept]:
    """The calls that are under way or have just ended, by request. Raises OSError, and MsgspecError for what
    nobody of ours wrote."""
    calls: dict[str, Kept] = {}
    for record in _records(path.read_bytes()):
        if record.ended:
            kept = calls.setdefault(record.request, Kept())
            kept.ended, kept.finish = True, record.finish
        elif not record.tokens:
            calls[record.request] = Kept()
        else:
            calls.setdefault(record.request, Kept()).add(record.tokens, record.logprobs)
    return calls


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
