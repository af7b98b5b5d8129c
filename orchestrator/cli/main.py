"""`relight`: from arguments to an exit code.

0 done, 1 failed, 2 wrong usage or configuration, a live duplicate or a bus that was never reached,
130 on Ctrl-C. What goes wrong on purpose is one sentence on stderr; a traceback is a bug of ours.
"""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from relight.events.errors import BusUnavailable, Fenced, RelightError, UsageError, leaves
from relight.orchestrator.cli import parser

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_EXIT_WITH_2 = (UsageError, BusUnavailable, Fenced)
"""Once a long-running command has reached the bus it waits for one that is away, so a BusUnavailable
that comes as far as here means that it was never reached; Fenced means a live duplicate."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default); its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as in `relight events | head`
        _drop_output()
        return DONE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(
            f"relight: cannot write to {error.filename or 'the output or a file'}: {error.strerror}",
            file=sys.stderr,
        )
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    return code


def _run(words: list[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    rest = words[cut + 1 :]
    grammar = parser.build()
    args = grammar.parse_args(words[:cut])
    args.rest = rest
    if cut < len(words) and args.command != "agent":
        grammar.error(f"relight {args.command} takes nothing after --")
    try:
        return int(import_module(f"relight.orchestrator.cli.{args.module}").run(args) or DONE)
    except (RelightError, BaseExceptionGroup) as error:
        return _failed(error)


def _failed(error: BaseException) -> int:
    causes = leaves(error)
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return INTERRUPTED
    for refused in causes:
        if isinstance(refused, BrokenPipeError) or getattr(refused, "errno", None) == errno.ENOSPC:
            raise refused
    if not all(isinstance(cause, RelightError) for cause in causes):
        raise error
    for cause in dict.fromkeys(str(cause) for cause in causes):
        print(f"relight: {cause}", file=sys.stderr)
    return USAGE if any(isinstance(cause, _EXIT_WITH_2) for cause in causes) else FAILED


def _open_closed_streams() -> None:
    """Open what the caller has closed, to nowhere: the next file would get its number, and be printed to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r"))


def _drop_output() -> None:
    """What is still buffered goes nowhere, or Python would fail over it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
