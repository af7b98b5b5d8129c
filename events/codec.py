"""Between messages and the fields of a stream entry, and between state and the fields of a hash.

Past this module there is no untyped message. What cannot be decoded raises Undecodable with the reason.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import msgspec

from relight.events.decisions import AnyDecision, Decision
from relight.events.envelope import Entry
from relight.events.errors import Undecodable
from relight.events.facts import AnyFact, Fact
from relight.events.ids import BEGINNING, EngineName, EntryId, Source
from relight.events.schema import EngineState, Meta, Snapshot
from relight.events.version import Version

Fields = dict[str, str]
T = TypeVar("T")

_ENGINE = "engine:"
_TIME = re.compile(r"[0-9]{1,14}")
"""Unix milliseconds, until the year 5138."""


def _to_wire(value: object) -> object:
    if isinstance(value, Version):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no form on the wire")


def _from_wire(kind: type, value: object) -> object:
    if kind is Version and isinstance(value, str):
        return Version.parse(value)
    raise ValueError(f"expected {kind.__name__}, got {value!r}")


_json = msgspec.json.Encoder(enc_hook=_to_wire)


def _decoders(union: Any) -> dict[str, msgspec.json.Decoder[Any]]:
    return {kind.__name__: msgspec.json.Decoder(kind, dec_hook=_from_wire) for kind in get_args(union)}


_facts = _decoders(AnyFact)
_decisions = _decoders(AnyDecision)
_meta = msgspec.json.Decoder(Meta, dec_hook=_from_wire)
_engine = msgspec.json.Decoder(EngineState, dec_hook=_from_wire)


def encode(message: Fact | Decision, *, source: Source, time_ms: int) -> Fields:
    """The fields of `message`'s entry, less `after`, which the commit script adds."""
    fields = {
        "type": type(message).__name__,
        "source": str(source),
        "time": str(time_ms),
        "data": to_json(message),
    }
    if isinstance(message, Decision):
        fields["id"] = message.id
    return fields


def entry(entry_id: str, fields: Mapping[str, str]) -> Entry:
    """The entry with these fields; what is absent or no time reads as empty, so that it can be parked."""
    stamp = fields.get("time", "")
    after = fields.get("after")
    return Entry(
        entry_id=EntryId(entry_id),
        type=fields.get("type", ""),
        source=Source(fields.get("source", "")),
        time=int(stamp) if _TIME.fullmatch(stamp) else 0,
        data=fields.get("data", ""),
        id=fields.get("id"),
        after=None if after is None else EntryId(after),
        traceparent=fields.get("traceparent"),
    )


def decode_fact(entry: Entry) -> AnyFact:
    """The fact in `entry`; raises Undecodable."""
    fact: AnyFact = _decode(entry, _facts)
    return fact


def decode_decision(entry: Entry) -> AnyDecision:
    """The decision in `entry`; raises Undecodable. NodeSilent and TrainerSilent are facts."""
    decision: AnyDecision = _decode(entry, _decisions)
    return decision


def is_fact(entry: Entry) -> bool:
    """Whether `entry`'s type is one of the facts (two of them stand in `decisions`)."""
    return entry.type in _facts


def _decode(entry: Entry, decoders: Mapping[str, msgspec.json.Decoder[Any]]) -> Any:
    decoder = decoders.get(entry.type)
    if decoder is None:
        raise Undecodable(f"entry {entry.entry_id}: unknown type {entry.type!r}")
    try:
        return decoder.decode(entry.data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(f"entry {entry.entry_id}: {entry.type} from {entry.source!r}: {error}") from error


def to_json(value: object) -> str:
    """`value` (any message or struct of ours) as JSON text."""
    return _json.encode(value).decode()


def from_json(text: str | bytes, kind: type[T]) -> T:
    """`text` as a `kind`; raises Undecodable."""
    try:
        return msgspec.json.decode(text, type=kind, dec_hook=_from_wire)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(f"{kind.__name__}: {error}") from error


def builtins(value: object) -> Any:
    """`value` as plain dicts, lists, numbers and strings, as they would stand in JSON."""
    return msgspec.to_builtins(value, enc_hook=_to_wire, str_keys=True)


def encode_engine(name: EngineName, state: EngineState) -> tuple[str, str]:
    """The field of the `state` hash that holds `state`, and what stands there."""
    return engine_field(name), to_json(state)


def engine_field(name: EngineName) -> str:
    """The field of the `state` hash that holds the engine's state."""
    return _ENGINE + name


def encode_meta(meta: Meta) -> tuple[str, str]:
    return "meta", to_json(meta)


def decode_state(fields: Mapping[str, str]) -> Snapshot:
    """The `state` hash as it was read with one HGETALL; raises Undecodable."""
    try:
        return Snapshot(
            commit=int(fields.get("commit", "0")),
            epoch=int(fields.get("epoch", "0")),
            cursor=EntryId(fields.get("cursor", BEGINNING)),
            tail=EntryId(fields.get("tail", BEGINNING)),
            meta=_meta.decode(fields["meta"]) if "meta" in fields else None,
            engines={
                EngineName(field.removeprefix(_ENGINE)): _engine.decode(value)
                for field, value in fields.items()
                if field.startswith(_ENGINE)
            },
        )
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(f"state: {error}") from error
