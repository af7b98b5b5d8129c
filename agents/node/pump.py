"""The log pump: a process that outlives the agent and copies an engine's output to a bounded file.

`python -I -S pump.py FILE LIMIT_BYTES` reads standard input until its end, prefixes each line with the time
in Unix ms, and keeps at most two files of LIMIT_BYTES: `FILE` and the one before it, `FILE.1`. Standard
library only, nothing of relight: it starts in a few milliseconds. An engine whose pipe nobody drains stops.
"""

import os
import sys
import time

_CHUNK = 65536


def _written(fd: int, data: bytes) -> None:
    """Write all of it. A full disk loses lines, it must not stop the engine."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError:
            return


def _turned(path: str, out: int, flags: int) -> int:
    """A new file; on a disk that takes none, the old one."""
    try:
        os.replace(path, path + ".1")  # noqa: PTH105 -- pathlib would double the start-up time
        fresh = os.open(path, flags, 0o600)
    except OSError:
        return out
    os.close(out)
    return fresh


def pump(path: str, limit: int) -> None:
    """Copy until the last writer is gone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    out = os.open(path, flags, 0o600)
    size = os.fstat(out).st_size
    rest = b""
    while chunk := os.read(0, _CHUNK):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        if len(rest) > _CHUNK:
            lines.append(rest)
            rest = b""
        stamp = b"%d " % (time.time_ns() // 1_000_000)
        data = b"".join(stamp + line + b"\n" for line in lines)
        if size + len(data) > limit:
            out, size = _turned(path, out, flags), 0
        _written(out, data)
        size += len(data)
    if rest:
        _written(out, b"%d " % (time.time_ns() // 1_000_000) + rest + b"\n")


if __name__ == "__main__":
    pump(sys.argv[1], int(sys.argv[2]))
