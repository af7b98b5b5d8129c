"""Logs on stderr: a constant message, then what it is about as key=value from the record's `extra`."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class KeyValues(logging.Formatter):
    """`TIME LEVEL LOGGER message key=value …`; values with spaces are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        name = record.name.removeprefix("relight.")
        pairs = [f"{key}={_quoted(value)}" for key, value in vars(record).items() if key not in _STANDARD]
        line = " ".join([stamp, record.levelname.lower(), name, record.getMessage(), *pairs])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(letter.isspace() for letter in text) else text


@contextmanager
def off() -> Generator[None]:
    """Have none of our own: what goes wrong is the command's last word."""
    ours = logging.getLogger("relight")
    before = ours.level
    ours.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        ours.setLevel(before)


def to_stderr() -> None:
    """Send our own logs from `info` on to stderr, and what libraries say from `warning` on."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(KeyValues())
    logging.basicConfig(level=logging.WARNING, handlers=[stream], force=True)
    logging.getLogger("relight").setLevel(logging.INFO)
