"""How a benchmark ends when it is told to."""

import signal
import sys


def on_sigterm() -> None:
    """Have SIGTERM end this process as an exception does, so that what it has started is ended first.

    Once: who signals a whole process group signals `make` as well, which passes it on to us.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)
