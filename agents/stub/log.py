"""What the server prints: vLLM-like lines on stdout, each flushed at once.

Writing blocks when nobody drains the pipe, as it does in vLLM, and a reader that is gone costs nothing.
"""

import contextlib
import os
import time

from aiohttp import web

_STDOUT = 1


def line(text: str) -> None:
    """One line, whole."""
    with contextlib.suppress(OSError):
        os.write(_STDOUT, text.encode() + b"\n")


def access(request: web.Request, status: int, **values: object) -> None:
    """An access line like uvicorn's with the time in ms and key-values after it."""
    version = f"HTTP/{request.version.major}.{request.version.minor}"
    request["logged"] = True
    told = {"request_id": values.pop("request_id", "-"), "time": int(time.time() * 1000), **values}
    pairs = " ".join(f"{name}={value}" for name, value in told.items())
    line(f'INFO:     {request.remote} - "{request.method} {request.path_qs} {version}" {status} {pairs}')


def flood(mebibytes: float) -> None:
    """So much output at once."""
    text = b"x" * 1023 + b"\n"
    for _ in range(round(mebibytes * 1024)):
        with contextlib.suppress(OSError):
            os.write(_STDOUT, text)
