"""The worker process: it holds what the weights are (names, shapes, hashes) and answers the core.

It ends when the core is gone. Its shared-memory segment is removed only when it was told to stop or got
SIGTERM; any other end leaves it behind, as SIGKILL does.
"""

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from relight.agents.stub.processes import shared_segment, spawn
from relight.agents.stub.weights import BadWeights, Tensors, digest_of, read_folder, replaced
from relight.agents.stub.wire import Ask, Start, Told, frame, receive_blocking, to_worker


class _CoreGone(Exception):
    pass


class _Stopped(Exception):
    pass


def main() -> None:
    """Serve one core over the inherited socket, whose number is the second argument."""
    channel = socket.socket(fileno=int(sys.argv[2]))
    try:
        with shared_segment(sys.argv[1].partition("::")[0]), contextlib.suppress(_Stopped):
            _serve(channel)
    except _CoreGone:
        os._exit(1)
    os._exit(0)


def _serve(channel: socket.socket) -> None:
    tensors: Tensors = {}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    while True:
        content = receive_blocking(channel)
        if content is None:
            raise _CoreGone
        message = to_worker.decode(content)
        if isinstance(message, Start):
            _obey(message)
            continue
        if message.what == "stop":
            return
        answer = Told()
        if message.what == "load":
            tensors, answer = _load(tensors, message)
        elif message.what == "checksums":
            answer = Told(tensors=dict(tensors))
        channel.sendall(frame(answer))


def _obey(start: Start) -> None:
    """Take the settings, also changed ones; strays are sent away by the first only."""
    knobs = start.settings.knobs
    signal.signal(signal.SIGTERM, signal.SIG_IGN if knobs.ignore_sigterm else _stop)
    for _ in range(0 if start.again else knobs.strays):
        title = f"{start.settings.title}::Stray"
        spawn("stray", title, (), str(knobs.stray_s), session=True).wait()


def _load(tensors: Tensors, ask: Ask) -> tuple[Tensors, Told]:
    if ask.sleep_s:
        signal.sigtimedwait({signal.SIGUSR1}, ask.sleep_s)
    try:
        new = read_folder(Path(ask.folder), values=not ask.dummy)
        if ask.half:
            new = {name: new[name] for name in sorted(new)[::2]}
        tensors = replaced(tensors, new) if tensors else new
    except BadWeights as error:
        return tensors, Told(error=str(error))
    return tensors, Told(digest=digest_of(tensors))


def _stop(*_: object) -> None:
    raise _Stopped


if __name__ == "__main__":
    main()
