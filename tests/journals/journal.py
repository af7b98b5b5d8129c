"""A journal: one line for each call of the core, in order, with what went in and what came out.

Outputs are kept as the bytes that go to the bus. Of the state a line holds the keys that changed, for people,
and a digest over the bytes of all of it, so that no byte can differ unseen.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from relight.events import codec
from relight.events.decisions import Decision
from relight.events.envelope import Entry
from relight.events.facts import AnyFact, Fact
from relight.events.ids import EngineName, EntryId, Source
from relight.events.schema import EngineState, Meta
from relight.orchestrator.core.job import Job
from relight.orchestrator.settings import Settings

FOLDER = Path(__file__).parents[1] / "data" / "journals"
NAMES = ("epoch", "settings", "meta", "engines")
"""Of a Job: all that is written down; another field would be lost in silence."""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", omit_defaults=True):
    """One line."""


class Given(Line, frozen=True, kw_only=True, tag="given"):
    """The job that the next call is made with, where it is not what the last call gave back."""

    epoch: int
    settings: dict[str, Any]
    meta: msgspec.Raw
    engines: dict[str, msgspec.Raw]


class Call(Line, frozen=True, kw_only=True, tag="call"):
    """One call of the core."""

    of: Literal["take_over", "step", "tick", "committed"]
    now: int
    bus: str | None = None
    """Of `take_over`: the server's stamp."""
    fact: msgspec.Raw = msgspec.Raw(b"null")
    """Of `step`: as it stands on the bus. (A union with None would not keep the bytes.)"""
    cause: EntryId | None = None
    decisions: tuple[msgspec.Raw, ...] = ()
    changes: msgspec.Raw = msgspec.Raw(b"{}")
    digest: str = ""


class Commit(Line, frozen=True, kw_only=True, tag="commit"):
    """What was given to the bus."""

    number: int
    decisions: str
    """Digest of their bytes."""
    count: int = 0
    stood: bool = True
    """False: its caller was killed before it knew, and the bus does not have it."""


class Bus(Line, frozen=True, kw_only=True, tag="bus"):
    """The last line: what stood in the stream of decisions when the run was over."""

    count: int
    digest: str
    rewritten: bool = False
    """The core has decided anew since, so this is not what stood there any more."""


AnyLine = Given | Call | Commit | Bus
_decoder = msgspec.json.Decoder(AnyLine)


def read(path: Path) -> Iterator[AnyLine]:
    for line in path.read_bytes().splitlines():
        yield _decoder.decode(line)


def written(line: AnyLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def fields(job: Job) -> dict[str, str]:
    """The whole state as it would stand on the bus."""
    return dict([codec.encode_meta(job.meta), *(codec.encode_engine(*each) for each in job.engines.items())])


def digest(texts: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for text in texts:
        whole.update(text.encode() + b"\n")
    return whole.hexdigest()[:24]


def state_digest(state: Mapping[str, str]) -> str:
    """Over every byte of every field, in the order of the fields' names."""
    return digest(f"{name} {state[name]}" for name in sorted(state))


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> msgspec.Raw:
    """Field by field the keys whose value is another one; null for a field that is gone."""
    found: dict[str, Any] = {}
    for name in sorted({*before, *after}):
        if name not in after:
            found[name] = None
        elif before.get(name) != after[name]:
            old = msgspec.json.decode(before.get(name, "{}"))
            new = msgspec.json.decode(after[name])
            found[name] = {key: value for key, value in new.items() if old.get(key, ...) != value}
    return msgspec.Raw(msgspec.json.encode(found))


def told(decisions: Sequence[Decision | Fact]) -> tuple[msgspec.Raw, ...]:
    return tuple(msgspec.Raw(codec.to_json(each).encode()) for each in decisions)


def given(job: Job) -> Given:
    assert Job._fields == NAMES, f"a job has other fields now: {Job._fields}"
    return Given(
        epoch=job.epoch,
        settings=msgspec.to_builtins(job.settings),
        meta=msgspec.Raw(codec.to_json(job.meta).encode()),
        engines={name: msgspec.Raw(codec.to_json(each).encode()) for name, each in job.engines.items()},
    )


def job_of(line: Given) -> Job:
    """Raises Undecodable or ValidationError where this core has no such state: record anew."""
    return Job(
        line.epoch,
        msgspec.convert(line.settings, Settings),
        codec.from_json(bytes(line.meta), Meta),
        {EngineName(name): codec.from_json(bytes(raw), EngineState) for name, raw in line.engines.items()},
    )


def fact_of(raw: msgspec.Raw) -> AnyFact:
    text = bytes(raw).decode()
    kind = msgspec.json.decode(text)["type"]
    return codec.decode_fact(Entry(entry_id=EntryId("0-0"), type=kind, source=Source("journal"), data=text))
