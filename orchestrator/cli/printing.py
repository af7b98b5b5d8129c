"""Values as tables for people and as JSON for programs, on standard output."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from relight.events import codec
from relight.events.envelope import Entry
from relight.orchestrator import chronicle

NONE = "-"


def as_json(value: object) -> None:
    """Print one JSON value on one line."""
    print(codec.to_json(value), flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under a head, each column as wide as its widest cell."""
    cells = [list(head), *([NONE if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def event(entry: Entry, *, since_ms: int | None = None) -> str:
    """One entry on one line: its sender's clock (or ms after `since_ms`), who, what, why, and its data.

    Whatever an entry holds, a terminal is sent printable characters alone.
    """
    told = chronicle.told(entry)
    stamp = _clock(entry.time) if since_ms is None else f"+{entry.time - since_ms:>6} ms"
    said = f"{told.reason} [{told.gist}]" if told.reason and told.gist else told.reason or told.gist
    mark = "FD"[chronicle.from_decisions(entry)]
    line = f"{stamp} {mark} {told.who:<20} {entry.type:<17} {told.of or NONE:<14} {said}".rstrip()
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


def _clock(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000.0, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
