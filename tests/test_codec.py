"""Between messages and the wire: what goes in comes out, the unknown is passed over, the wrong is told."""

import json
import typing
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.events import codec
from relight.events.decisions import AnyDecision, Decision
from relight.events.envelope import Entry
from relight.events.errors import Undecodable
from relight.events.facts import AnyFact, Fact
from relight.events.ids import EngineName, Source
from relight.events.schema import EngineState, Meta, Snapshot
from relight.events.version import Version

FACTS: list[type[Fact]] = list(get_args(AnyFact))
DECISIONS: list[type[Decision]] = list(get_args(AnyDecision))
SOURCE = Source("agent/a")

numbers = st.integers(0, 2**53)
versions = st.builds(Version, numbers, numbers)
st.register_type_strategy(Version, versions)
st.register_type_strategy(str, st.text(st.characters(codec="utf-8"), max_size=12))
st.register_type_strategy(int, numbers)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
evidence = st.dictionaries(st.text("abc", min_size=1), st.none() | st.booleans() | st.text("abc"), max_size=2)


def values(kind: Any) -> "st.SearchStrategy[Any]":
    """Values of a message's field, whatever its type."""
    origin, args = typing.get_origin(kind), get_args(kind)
    if kind is Any:
        return st.none() | st.booleans() | st.text("abc")
    if isinstance(kind, typing.NewType):
        return values(kind.__supertype__)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=2)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if args:
        return st.one_of([st.none() if arg is type(None) else values(arg) for arg in args])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return st.builds(kind, **{name: values(hint) for name, hint in typing.get_type_hints(kind).items()})
    return st.from_type(kind)


def structs(kind: type[msgspec.Struct]) -> "st.SearchStrategy[Any]":
    hints = typing.get_type_hints(kind)
    fields = {name: st.deferred(lambda hint=hints[name]: values(hint)) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


def on_the_wire(message: Fact | Decision) -> Entry:
    return codec.entry("1-0", codec.encode(message, source=SOURCE, time_ms=17))


def with_data(kind: type[Fact] | type[Decision], data: Any) -> Entry:
    return codec.entry(
        "1-0", {"type": kind.__name__, "source": SOURCE, "time": "1", "data": json.dumps(data)}
    )


@pytest.mark.parametrize("kind", FACTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_fact_comes_back_as_it_was(kind: type[Fact], data: st.DataObject) -> None:
    fact = data.draw(structs(kind))
    entry = on_the_wire(fact)
    assert codec.decode_fact(entry) == fact
    assert (entry.type, entry.source, entry.time, entry.id) == (kind.__name__, SOURCE, 17, None)
    assert codec.is_fact(entry)


@pytest.mark.parametrize("kind", DECISIONS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_decision_comes_back_as_it_was(kind: type[Decision], data: st.DataObject) -> None:
    decision = data.draw(structs(kind))
    entry = on_the_wire(decision)
    assert codec.decode_decision(entry) == decision
    assert entry.id == decision.id
    assert not codec.is_fact(entry)


@given(
    engines=st.dictionaries(st.from_regex(r"[a-z0-9][a-z0-9-]{0,9}", fullmatch=True), structs(EngineState)),
    meta=st.none() | structs(Meta),
)
def test_the_state_comes_back_as_it_was(engines: dict[str, EngineState], meta: Meta | None) -> None:
    fields = {"commit": "5", "epoch": "9000000000001", "cursor": "7-1", "tail": "8-2", "later": "?"}
    fields |= dict(codec.encode_engine(EngineName(name), engine) for name, engine in engines.items())
    fields |= dict([codec.encode_meta(meta)] if meta else [])
    assert codec.decode_state(fields) == Snapshot(
        commit=5,
        epoch=9_000_000_000_001,
        cursor=codec.EntryId("7-1"),
        tail=codec.EntryId("8-2"),
        meta=meta,
        engines={EngineName(name): engine for name, engine in engines.items()},
    )


def test_a_bus_without_a_state_reads_as_an_empty_one() -> None:
    assert codec.decode_state({}) == Snapshot()


@pytest.mark.parametrize("kind", [*FACTS, *DECISIONS], ids=lambda kind: kind.__name__)
def test_fields_that_are_not_known_yet_are_passed_over(kind: type[Fact] | type[Decision]) -> None:
    message = msgspec.convert(example(kind), kind, dec_hook=codec._from_wire)
    later = with_data(kind, {**codec.builtins(message), "from_the_future": {"a": [1]}})
    decoded = codec.decode_fact(later) if issubclass(kind, Fact) else codec.decode_decision(later)
    assert decoded == message


def example(kind: Any) -> Any:
    """The least that a message of `kind` needs, as JSON would have it."""
    info = msgspec.inspect.type_info(kind)
    return {"type": kind.__name__, **{f.encode_name: least(f.type) for f in info.fields if f.required}}


def least(info: Any) -> Any:
    inspect = msgspec.inspect
    match info:
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.StrType():
            return "x"
        case inspect.BoolType():
            return True
        case inspect.CustomType():
            return "1.2"
        case inspect.VarTupleType():
            return []
        case inspect.LiteralType():
            return info.values[0]
        case inspect.EnumType():
            return next(iter(info.cls)).value
        case inspect.StructType():
            return {f.encode_name: least(f.type) for f in info.fields if f.required}
        case inspect.UnionType():
            return None
        case _:
            raise AssertionError(info)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"type": "EngineDied", "data": "{}"}, r"entry 1-0: unknown type 'EngineDied'"),
        ({}, r"entry 1-0: unknown type ''"),
        ({"type": "NodeUp", "data": '{"more":' + "[" * 200_000}, r"entry 1-0: NodeUp .*recursion"),
        ({"type": "EngineDead", "data": ""}, r"entry 1-0: EngineDead from 'agent/a': "),
        ({"type": "EngineDead", "data": "[1]"}, r"EngineDead from 'agent/a': .*object"),
        (
            {"type": "EngineDead", "data": '{"engine":"e0","cause":"oom"}'},
            r"missing required field `incarnation`",
        ),
        (
            {"type": "EngineDead", "data": '{"engine":"e0","incarnation":"1","cause":"oom"}'},
            r"Expected `int`, got `str` - at `\$\.incarnation`",
        ),
        (
            {"type": "EngineDead", "data": '{"engine":"e0","incarnation":1,"cause":"boredom"}'},
            r"Invalid enum value 'boredom' - at `\$\.cause`",
        ),
        (
            {"type": "NodeUp", "data": '{"node":"a","boot":"b","engines":[{"engine":"e","state":"well"}]}'},
            r"at `\$\.engines\[0\]\.state`",
        ),
        (
            {"type": "JobFinished", "data": '{"type":"NodeUp","run":1}'},
            r"Invalid value 'NodeUp' - at `\$\.type`",
        ),
        (
            {"type": "WeightsPublished", "data": '{"version":"7","uri":"u","digest":"d"}'},
            r"version '7' is not RUN\.STEP with two whole numbers - at `\$\.version`",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(fields: dict[str, str], why: str) -> None:
    with pytest.raises(Undecodable, match=why):
        codec.decode_fact(codec.entry("1-0", {"source": "agent/a"} | fields))


def test_a_fact_is_no_decision_and_a_decision_no_fact() -> None:
    with pytest.raises(Undecodable, match="unknown type 'NodeUp'"):
        codec.decode_decision(codec.entry("1-0", {"type": "NodeUp", "data": "{}"}))
    with pytest.raises(Undecodable, match="unknown type 'Alarm'"):
        codec.decode_fact(codec.entry("1-0", {"type": "Alarm", "data": "{}"}))


@pytest.mark.parametrize(
    "fields", [{"commit": "x"}, {"meta": "{"}, {"meta": "{}"}, {"engine:e0": '{"node":1}'}, {"epoch": ""}]
)
def test_a_state_that_is_not_ours_is_told(fields: dict[str, str]) -> None:
    with pytest.raises(Undecodable, match="state: "):
        codec.decode_state(fields)


@pytest.mark.parametrize("stamp", ["", "soon", "-5", "1e3", "٣", "9" * 15, "9" * 5000])
def test_a_senders_clock_that_is_no_number_reads_as_zero(stamp: str) -> None:
    assert codec.entry("1-0", {"time": stamp}).time == 0


def test_long_numbers_and_empty_lists_keep_their_form() -> None:
    """What cjson would spoil, and why no script of ours parses JSON."""
    entry = with_data(FACTS[0], {"node": "a", "boot": "b", "max_epoch": 2**53 + 1, "engines": []})
    fact = codec.decode_fact(entry)
    assert json.loads(codec.to_json(fact))["max_epoch"] == 2**53 + 1
    assert '"engines":[]' in codec.to_json(fact)


@pytest.mark.parametrize(("older", "newer"), [("7.9", "8.0"), ("7.9", "7.10"), ("0.0", "0.1")])
def test_versions_are_ordered_as_pairs_of_numbers(older: str, newer: str) -> None:
    assert Version.parse(older) < Version.parse(newer)
    assert str(Version.parse(newer)) == newer


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.2", "1.x", "٣.1", "1. 2"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not RUN\.STEP"):
        Version.parse(text)
