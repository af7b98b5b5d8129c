"""The worker process: it holds what the weights are (names, shapes, hashes) and answers the core.

It ends when the core is gone. Its shared-memory segment is removed only when it was told to stop or got
SIGTERM; any other end leaves it behind, as SIGKILL does.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from relight.agents.stub.knobs import Knobs
from relight.agents.stub.processes import shared_segment, spawn
from relight.agents.stub.weights import BadWeights, Tensors, digest_of, read_folder, replaced
from relight.agents.stub.wire import Ask, Start, Told, frame, receive_blocking, to_worker


class _CoreGone(Exception):
    pass


def main() -> None:
    """Serve one core over the inherited socket, whose number is the second argument."""
    channel = socket.socket(fileno=int(sys.argv[2]))
    knobs = Knobs()
    try:
        with shared_segment():
            _serve(channel, knobs)
    except _CoreGone:
        os._exit(1)


def _serve(channel: socket.socket, knobs: Knobs) -> None:
    tensors: Tensors = {}
    _obey_sigterm(knobs.ignore_sigterm)
    while True:
        content = receive_blocking(channel)
        if content is None:
            raise _CoreGone
        message = to_worker.decode(content)
        if isinstance(message, Start):
            prefix, knobs = message.settings.title, message.settings.knobs
            _obey_sigterm(knobs.ignore_sigterm)
            for _ in range(knobs.strays):
                stray = spawn("stray", f"{prefix}::Stray", (), str(knobs.stray_s), "daemonise", session=True)
                stray.wait()
            continue
        if message.what == "stop":
            return
        answer = Told()
        if message.what == "load":
            tensors, answer = _load(tensors, message)
        elif message.what == "checksums":
            answer = Told(tensors=dict(tensors))
        elif message.what == "knobs":
            _obey_sigterm(message.ignore_sigterm)
        channel.sendall(frame(answer))


def _load(tensors: Tensors, ask: Ask) -> tuple[Tensors, Told]:
    if ask.sleep_s:
        signal.sigtimedwait({signal.SIGUSR1}, ask.sleep_s)
    try:
        new = read_folder(Path(ask.folder), values=not ask.dummy)
        tensors = replaced(tensors, new) if tensors else new
    except BadWeights as error:
        return tensors, Told(error=str(error))
    return tensors, Told(digest=digest_of(tensors))


def _obey_sigterm(ignore: bool) -> None:  # noqa: FBT001
    quit_now: Callable[..., None] = _leave
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else quit_now)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(*_: object) -> None:
    raise _Stopped


class _Stopped(Exception):
    pass


if __name__ == "__main__":
    main()
