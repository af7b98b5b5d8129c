"""One command under bounds: `python -I -S bounded.py FILE LIMIT_BYTES SECONDS COMMAND…`.

What it prints goes to FILE, at most LIMIT_BYTES of it; after SECONDS, or once its first process has ended,
its whole process group is killed. Standard library only, nothing of relight.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time

_CHUNK = 65536


def run(path: str, limit: int, seconds: float, command: "list[str]") -> None:
    """Run it to its end, its own or the bounds'."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    _write(out, b"$ %s\n" % " ".join(command).encode())
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        _write(out, b"[%s]\n" % str(error).encode())
        return
    assert child.stdout is not None
    ended = _copy(child, out, limit, began + seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    how = f"ended with code {child.wait()}" if ended else f"killed after {seconds:g} s"
    _write(out, f"[{how}, {time.monotonic() - began:.1f} s after its start]\n".encode())


def _copy(child: "subprocess.Popen[bytes]", out: int, limit: int, deadline: float) -> bool:
    """Copy what it prints until it has ended (True) or the deadline is there (False)."""
    assert child.stdout is not None
    written = 0
    exited = os.pidfd_open(child.pid)
    with selectors.DefaultSelector() as waiting:
        waiting.register(child.stdout, selectors.EVENT_READ)
        waiting.register(exited, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            ready = [key.fileobj for key, _ in waiting.select(max(left, 0.0))]
            if child.stdout in ready:
                piece = os.read(child.stdout.fileno(), _CHUNK)
                if not piece:
                    waiting.unregister(child.stdout)
                _write(out, piece[: max(0, limit - written)])
                written += len(piece)
            elif exited in ready:
                return True
            elif left <= 0:
                return False


def _write(out: int, data: bytes) -> None:
    """A full disk loses evidence and nothing else."""
    try:
        os.write(out, data)
    except OSError:
        return


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
