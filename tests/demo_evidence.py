"""Evidence of real demos with the stub, recorded once, and ways to make it wrong in one place.

`python -m tests.demo_evidence` from the repository's root records it anew: after a change of what is seen.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec

from relight.events import codec
from relight.events.decisions import Decision
from relight.events.envelope import Entry
from relight.events.facts import Fact
from relight.events.ids import EntryId, Source
from relight.orchestrator.cli.demo import layout
from relight.orchestrator.cli.demo.checks.case import Case
from relight.orchestrator.cli.demo.evidence import Evidence, Look, Piece, Request, Turn
from relight.orchestrator.cli.demo.layout import Place
from relight.orchestrator.cli.demo.play import play
from relight.orchestrator.cli.demo.report import Progress

DATA = Path(__file__).with_name("data")
RECORDED: dict[str, tuple[int, Any, Any]] = {
    "two-engines": (2, "kill-core", "boundary"),
    "snapshot": (1, "kill-core", "snapshot"),
    "take-over": (1, "kill-orchestrator", "boundary"),
}
"""Name of the recording: engines, fault, where recovery takes its weights from."""

S = TypeVar("S", bound=msgspec.Struct)
replace = msgspec.structs.replace


def load(name: str) -> Evidence:
    return msgspec.json.decode((DATA / f"demo-{name}.json").read_bytes(), type=Evidence)


def record() -> None:
    DATA.mkdir(exist_ok=True)
    for name, (engines, fault, recover_at) in RECORDED.items():
        plan = layout.plan("stub", engines=engines, fault=fault, recover_at=recover_at)
        root = Path(tempfile.mkdtemp(prefix="relight-demo-"))
        evidence = anyio.run(play, plan, Place(root), Progress(sys.stderr))
        text = msgspec.json.format(msgspec.json.encode(evidence), indent=1)
        (DATA / f"demo-{name}.json").write_bytes(text + b"\n")
        shutil.rmtree(root)


# --- messages --------------------------------------------------------------------------------------------


def _encoded(entry: Entry, message: Fact | Decision) -> Entry:
    decision_id = message.id if isinstance(message, Decision) else entry.id
    return replace(entry, type=type(message).__name__, data=codec.to_json(message), id=decision_id)


def found(evidence: Evidence, kind: type[Any], **fields: Any) -> list[tuple[Entry, Any]]:
    """The messages of that type whose fields have these values."""
    told: list[tuple[Entry, Any]] = Case(evidence).told(kind)
    return [each for each in told if all(getattr(each[1], name) == value for name, value in fields.items())]


def edited(
    evidence: Evidence, kind: type[Any], where: dict[str, Any], at: int = 0, **changes: Any
) -> Evidence:
    """With one message's fields changed: the one at place `at` of those that `where` describes."""
    entry, message = found(evidence, kind, **where)[at]
    fresh = _encoded(entry, replace(message, **changes))
    return replace(
        evidence,
        facts=tuple(fresh if each is entry else each for each in evidence.facts),
        decisions=tuple(fresh if each is entry else each for each in evidence.decisions),
    )


def swapped(evidence: Evidence, one: Entry, other: Entry) -> Evidence:
    """With what two entries of a stream say exchanged; ids of the stream and the chain stay."""

    def says(entry: Entry, like: Entry) -> Entry:
        return replace(entry, type=like.type, data=like.data, id=like.id)

    def fresh(entry: Entry) -> Entry:
        return says(one, other) if entry is one else says(other, one) if entry is other else entry

    return replace(
        evidence, facts=tuple(map(fresh, evidence.facts)), decisions=tuple(map(fresh, evidence.decisions))
    )


def told_too(evidence: Evidence, fact: Fact) -> Evidence:
    """With one more fact at the end."""
    entry = replace(evidence.facts[-1], entry_id=EntryId("9" * 14 + "-0"), source=Source("agent/demo"))
    return replace(evidence, facts=(*evidence.facts, _encoded(entry, fact)))


def decided_too(evidence: Evidence, decision: Decision, *, before: Entry | None = None) -> Evidence:
    """With one more decision under an id of its own, chained, before an entry or at the end."""
    entries = list(evidence.decisions)
    place = len(entries) if before is None else entries.index(before)
    ms, serial = map(int, entries[place - 1].entry_id.split("-"))
    decision = replace(decision, id=f"{decision.epoch}-999999")
    entries.insert(
        place, _encoded(replace(entries[place - 1], entry_id=EntryId(f"{ms}-{serial + 1}")), decision)
    )
    for at in range(place + 1, len(entries)):
        ms_after, serial_after = map(int, entries[at].entry_id.split("-"))
        if ms_after == ms:
            entries[at] = replace(entries[at], entry_id=EntryId(f"{ms}-{serial_after + 1}"))
    chained = [
        replace(entry, after=entries[at - 1].entry_id if at else entry.after)
        for at, entry in enumerate(entries)
    ]
    return replace(evidence, decisions=tuple(chained))


def without(evidence: Evidence, kind: type[Any]) -> Evidence:
    """Without any fact of that type."""
    gone = {entry.entry_id for entry, _ in found(evidence, kind)}
    return replace(evidence, facts=tuple(entry for entry in evidence.facts if entry.entry_id not in gone))


# --- everything else -------------------------------------------------------------------------------------


def turn(evidence: Evidence, mode: str, **changes: Any) -> Evidence:
    turns: list[Turn] = [replace(each, **changes) if each.mode == mode else each for each in evidence.turns]
    return replace(evidence, turns=tuple(turns))


def piece(evidence: Evidence, at: int, **changes: Any) -> Evidence:
    pieces: list[Piece] = list(evidence.pieces)
    pieces[at] = replace(pieces[at], **changes)
    return replace(evidence, pieces=tuple(pieces))


def look(evidence: Evidence, when: str, engine: str, **changes: Any) -> Evidence:
    looks: tuple[Look, ...] = getattr(evidence, when)
    fresh = tuple(replace(each, **changes) if each.engine == engine else each for each in looks)
    return replace(evidence, **{when: fresh})


def request(evidence: Evidence, at: int, **changes: Any) -> Evidence:
    requests: list[Request] = list(evidence.requests)
    requests[at] = replace(requests[at], **changes)
    return replace(evidence, requests=tuple(requests))


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    """A tuple with another value at one place."""
    return (*values[:at], value, *values[at + 1 :])


if __name__ == "__main__":
    record()
