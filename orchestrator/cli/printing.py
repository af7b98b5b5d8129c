"""Values as tables for people and as JSON for programs, on standard output."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

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
    data = chronicle.data_of(entry)
    decided = chronicle.from_decisions(entry)
    rest = {key: data[key] for key in data if key not in _BESIDE | (_OF_DECISIONS if decided else set())}
    name = data.get("engine")
    of = NONE if name is None else f"{name}.{data.get('incarnation', '?')}"
    stamp = _clock(entry.time) if since_ms is None else f"+{entry.time - since_ms:>6} ms"
    gist = _gist(rest) if data else _short(entry.data)
    why = _first_line(str(data.get("reason") or ""))
    told = f"{why} [{gist}]" if why and gist else why or gist
    who = "orchestrator" if decided else entry.source
    line = f"{stamp} {'FD'[decided]} {who:<20} {entry.type:<17} {of:<14} {told}".rstrip()
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)


_BESIDE = frozenset({"type", "engine", "incarnation"})
"""What an entry's line shows in columns of their own."""
_OF_DECISIONS = frozenset({"id", "epoch", "reason", "cause", "recovery", "deadline"})
"""What ties decisions together; of these a person is shown the reason."""


def _gist(data: dict[str, Any]) -> str:
    shown = ((key, _short(value)) for key, value in data.items())
    return " ".join(f"{key}={text}" for key, text in shown if text)


def _short(value: object) -> str:
    """`value` in at most about 60 characters; empty for nothing at all."""
    if value is None or value is False or value in ([], {}):
        return ""
    if isinstance(value, dict):
        return f"{{{_gist(cast('dict[str, Any]', value))}}}"
    if isinstance(value, list):
        items = cast(Sequence[Any], value)
        return f"[{' '.join(map(_short, items))}]" if len(items) <= 4 else f"[{len(items)} of them]"
    if isinstance(value, float):
        return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"
    text = _first_line(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _first_line(text: str) -> str:
    """`text`, marked where lines below it, such as those of an engine's log, are left out."""
    first, _, more = text.partition("\n")
    return f"{first} ..." if more else first


def _clock(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000.0, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
