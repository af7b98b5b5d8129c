"""What happened in a job, from the entries of its streams: for the commands and the page that tell it.

Pure, and generous: an entry that cannot be decoded is shown as it stands.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from relight.events import codec
from relight.events.envelope import Entry
from relight.events.errors import Undecodable
from relight.events.ids import EngineName, RecoveryId
from relight.events.schema import EngineState


def from_decisions(entry: Entry) -> bool:
    """Whether the entry stands in `decisions`, where each names the one before it."""
    return entry.after is not None


def data_of(entry: Entry) -> dict[str, Any]:
    """The entry's JSON object; empty where it is none."""
    try:
        return codec.from_json(entry.data, dict[str, Any])
    except Undecodable:
        return {}


def as_on_bus(entry: Entry) -> dict[str, Any]:
    """The entry's fields with its `data` as an object (as text where it is none), for JSON output."""
    fields: dict[str, Any] = {
        "entry_id": entry.entry_id,
        "stream": "decisions" if from_decisions(entry) else "facts",
        "type": entry.type,
        "source": entry.source,
        "time": entry.time,
        "data": data_of(entry) or entry.data,
    }
    optional = {"id": entry.id, "after": entry.after, "traceparent": entry.traceparent}
    return fields | {name: value for name, value in optional.items() if value is not None}


class Told(NamedTuple):
    """One entry in the words of a line: who, of whom, why, and what else it says."""

    who: str
    of: str
    """`ENGINE.INCARNATION`; empty where it is of no engine."""
    reason: str
    gist: str


def told(entry: Entry) -> Told:
    """The entry in short; what lies below the first line of a text, such as an engine's log, is left out."""
    data = data_of(entry)
    decided = from_decisions(entry)
    rest = {key: data[key] for key in data if key not in _BESIDE | (_OF_DECISIONS if decided else set())}
    name = data.get("engine")
    return Told(
        who="orchestrator" if decided else entry.source,
        of="" if name is None else f"{name}.{data.get('incarnation', '?')}",
        reason=_first_line(str(data.get("reason") or "")),
        gist=_gist(rest) if data else _short(entry.data),
    )


_BESIDE = frozenset({"type", "engine", "incarnation"})
"""What a line shows in columns of their own."""
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


def of_types(entries: Iterable[Entry], types: frozenset[str]) -> list[Entry]:
    """Those whose type is one of `types`; all where it is empty."""
    return [entry for entry in entries if not types or entry.type in types]


def last_recovery(entries: Sequence[Entry], engine: EngineName) -> RecoveryId | None:
    """The newest recovery that a decision about `engine` names; None where none does."""
    for entry in reversed(entries):
        data = data_of(entry)
        if from_decisions(entry) and data.get("engine") == engine and data.get("recovery"):
            return RecoveryId(data["recovery"])
    return None


def explained(
    entries: Sequence[Entry], name: EngineName, engine: EngineState, recovery: RecoveryId | None = None
) -> tuple[RecoveryId | None, list[Entry]]:
    """One recovery of the engine and its chain: the one that is named, else the one under way, else the
    newest one that `entries` hold."""
    under_way = engine.recovery.id if engine.recovery else None
    found = recovery or under_way or last_recovery(entries, name)
    return found, chain(entries, name, found) if found else []


def explained_as_json(
    name: EngineName, engine: EngineState, recovery: RecoveryId | None, chain: Iterable[Entry]
) -> dict[str, Any]:
    """The same for JSON output."""
    told = {"engine": name, "phase": engine.phase, "recovery": recovery}
    return {**told, "chain": [as_on_bus(entry) for entry in chain]}


def chain(entries: Sequence[Entry], engine: EngineName, recovery: RecoveryId) -> list[Entry]:
    """What led to a recovery of `engine` and what came of it, in the order of the bus.

    The end of the incarnation that was lost; the recovery's decisions; the facts that caused or answered
    them; and the sync that brought its weights, with what the trainer said of that sync.
    """
    rows = [_Row(entry, data_of(entry)) for entry in entries]
    rows = [row for row in rows if row.data.get("engine", engine) == engine]
    decided = [row for row in rows if row.decision and row.data.get("recovery") == recovery]
    led = _causes(rows, decided)
    syncs = {sync for row in [*decided, *led] if (sync := row.data.get("sync"))}
    synced = [row for row in rows if row.data.get("sync") in syncs]
    orders = [row for row in [*decided, *synced] if row.decision]
    asked = {row.entry.id for row in orders if row.entry.id is not None}
    answers = [row for row in rows if row.data.get("answers") in asked]
    ends = [row for row in rows if row.entry.type in _ENDS and _lost(recovery, engine) == row.incarnation]
    kept = {row.place for row in [*ends, *decided, *synced, *answers, *_causes(rows, orders)]}
    return [row.entry for row in rows if row.place in kept]


class _Row(NamedTuple):
    entry: Entry
    data: dict[str, Any]

    @property
    def decision(self) -> bool:
        return from_decisions(self.entry)

    @property
    def incarnation(self) -> str:
        return str(self.data.get("incarnation"))

    @property
    def place(self) -> tuple[bool, str]:
        """What is unique of an entry: the two streams give out ids of their own."""
        return self.decision, self.entry.entry_id


_ENDS = ("EngineDead", "StartFailed")
"""What an incarnation is lost by, as its agent says it."""


def _lost(recovery: RecoveryId, engine: EngineName) -> str:
    """The incarnation that `recovery` (`ENGINE.INCARNATION-EPOCH-SERIAL`) is of; empty where it is not."""
    name, _, rest = recovery.partition(".")
    return rest.partition("-")[0] if name == engine else ""


def _causes(rows: Iterable[_Row], decisions: Iterable[_Row]) -> list[_Row]:
    """The facts among `rows` that `decisions` name as their cause."""
    named = {row.data.get("cause") for row in decisions}
    return [row for row in rows if row.entry.entry_id in named and codec.is_fact(row.entry)]
