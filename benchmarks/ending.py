"""How a benchmark ends when it is told to."""

import sys

from relight.orchestrator.cli.running import on_first_sigterm


def on_sigterm() -> None:
    """Have SIGTERM end this process as an exception does, so that what it has started is ended first."""
    on_first_sigterm(lambda: sys.exit(143))
