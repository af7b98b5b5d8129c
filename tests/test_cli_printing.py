"""What people read: lines of entries, tables, logs. Nothing that stands on a bus breaks them."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.events import codec
from relight.events.envelope import Entry
from relight.events.ids import EngineName, JobName, NodeName, RecoveryId
from relight.events.schema import EngineState, Snapshot
from relight.events.values import Phase
from relight.orchestrator import chronicle
from relight.orchestrator.cli import logs, printing, status
from relight.orchestrator.concerns import Seen
from relight.orchestrator.views import job_view

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6),
    max_leaves=8,
)


def entry(data: str, **fields: str) -> Entry:
    return codec.entry(
        "1-0", {"type": "EngineDead", "source": "agent/a", "time": "0", "data": data, **fields}
    )


@given(st.text() | json_values.map(json.dumps), st.sampled_from(["", "7-1"]))
def test_any_entry_can_be_shown_and_told_as_json(data: str, after: str) -> None:
    shown = entry(data, **({"after": after} if after else {}))
    assert printing.event(shown)
    told = json.loads(codec.to_json(chronicle.as_on_bus(shown)))
    assert told["stream"] == ("decisions" if after else "facts")


def test_what_is_no_json_is_shown_as_it_stands() -> None:
    assert printing.event(entry("{broken")).endswith("{broken")


def test_lines_of_log_below_a_reason_and_a_value_are_left_out() -> None:
    detail = {"reason": "its core ended\nINFO one\nINFO two", "detail": "its core ended\nINFO one"}
    line = printing.event(entry(json.dumps(detail), after="7-1"))
    assert line.endswith("its core ended ... [detail=its core ended ...]")


def test_a_terminal_is_sent_nothing_that_moves_it() -> None:
    spoilt = entry('{"reason": "\\u001b[2J"}', source="\x1b]0;mine\x07", type="A\nB")
    assert printing.event(spoilt).isprintable()


def test_milliseconds_are_whole_where_they_are_many() -> None:
    line = printing.event(entry('{"total": 17943.2, "detect": 0.5553}'))
    assert line.endswith("total=17943 detect=0.555")


def test_an_exit_code_of_0_is_shown_and_what_is_absent_is_not() -> None:
    line = printing.event(entry('{"engine":"e0","incarnation":1,"exit_code":0,"signal":null,"detail":""}'))
    assert line.split()[-2:] == ["e0.1", "exit_code=0"]


def test_long_values_are_shortened() -> None:
    line = printing.event(entry(json.dumps({"tokens": list(range(100)), "detail": "x" * 500})))
    assert "tokens=[100 of them]" in line and len(line) < 200


_NAMED = ("engine", "incarnation")


def test_an_explanation_begins_with_the_end_of_what_was_lost() -> None:
    """Also where nothing was decided yet: a start that failed is waited out first."""
    lost = (("e0", 1), ("e0", 2), ("e1", 2))
    failed = [
        codec.entry(
            f"{place}-0", {"type": "StartFailed", "data": json.dumps(dict(zip(_NAMED, one, strict=True)))}
        )
        for place, one in enumerate(lost)
    ]
    told = chronicle.chain(failed, EngineName("e0"), RecoveryId("e0.2-17-5"))
    assert [chronicle.data_of(one) for one in told] == [{"engine": "e0", "incarnation": 2}]


def test_columns_are_as_wide_as_their_widest_cell(capsys: pytest.CaptureFixture[str]) -> None:
    printing.table(("A", "LONG HEAD"), [("wide cell", None), (1, "x")])
    assert capsys.readouterr().out == "A          LONG HEAD\nwide cell  -\n1          x\n"


def test_an_engine_in_backoff_says_when_it_starts_again(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = EngineState(phase=Phase.BACKOFF, node=NodeName("a"), incarnation=2, not_before=42_000)
    shown = Snapshot(engines={EngineName("e0"): waiting})
    for now_ms, said in ((30_000, "its next start, in 12 s"), (42_000, "-")):
        status.show(job_view(JobName("j"), shown, Seen(now_ms=now_ms)))
        assert capsys.readouterr().out.splitlines()[-1].endswith(said)


def record(message: str, *args: object, **extra: object) -> str:
    made = logging.makeLogRecord(
        {"name": "relight.agents.x", "levelname": "INFO", "msg": message, "args": args, **extra}
    )
    return logs.KeyValues().format(made).partition(" ")[2]


def test_logs_are_a_message_and_what_it_is_about() -> None:
    assert record("engine is gone engine=%s", "e0.1") == "info agents.x engine is gone engine=e0.1"
    assert (
        record("bus is away", reason="no route", tries=2)
        == "info agents.x bus is away reason='no route' tries=2"
    )
