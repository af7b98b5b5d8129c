"""What replays cost and do to samples, as numbers and as metrics."""

import re
from typing import Any

from relight.agents.replay import metrics
from relight.agents.replay.tally import Account, Numbers, Outcome
from relight.agents.replay.turn import Attempt, Choice, End, Span, Turn
from relight.events.ids import EngineName


def attempt(reason: End, *, kept: int = 0, made: int = 0, restarted: str | None = None) -> Attempt:
    return Attempt(
        engine=EngineName("e0"),
        incarnation=1,
        version="7.1",
        request_id="r-0",
        kept=kept,
        sent=3 + kept,
        max_tokens=8,
        made=made,
        restarted=restarted,
        reason=reason,
        detail="",
        started_at=0.0,
        first_token_s=0.0,
        seconds=1.0,
    )


def turn(length: int, *attempts: Attempt, versions: tuple[Span, ...] | None = None) -> Turn:
    choice = Choice(
        token_ids=list(range(length)),
        scored=None,
        finish_reason="stop",
        stop_reason=None,
        versions=(Span("7.1", 0, length),) if versions is None else versions,
        routed_experts=None,
        sampling_mask=None,
    )
    return Turn(request_id="r", choices=(choice,), attempts=attempts)


def account(whole: Turn, *, taken: int | None = None, **changes: Any) -> Account:
    there = len(whole.token_ids)
    fields: dict[str, Any] = {"outcome": Outcome.COMPLETE, "suspect": False, "gaps_s": (), **changes}
    return Account(turn=whole, taken=there if taken is None else taken, **fields)


UNTOUCHED = account(turn(100, attempt(End.COMPLETE, made=100)))
CONTINUED = account(
    turn(
        300,
        attempt(End.RESET, made=40),
        attempt(End.FENCED, kept=40, made=60),
        attempt(End.COMPLETE, kept=100, made=200),
        versions=(Span("7.1", 0, 100), Span("7.2", 100, 300)),
    ),
    suspect=True,
    gaps_s=(0.25, 2.0),
)
RESTARTED = account(
    turn(
        50,
        attempt(End.RESET, made=30),
        attempt(End.EOF, restarted="version moved from 7.1 to 7.2"),
        attempt(End.COMPLETE, made=50, restarted="drift at the seam: 0.5 is over 0.1"),
    ),
    taken=80,
)
POISON = account(turn(10, attempt(End.RESET, made=10)), outcome=Outcome.POISON)


def counted(*accounts: Account) -> Numbers:
    numbers = Numbers()
    for each in accounts:
        numbers.add(each)
    return numbers


def test_a_step_tells_what_was_kept_what_was_sampled_twice_and_why() -> None:
    told = counted(UNTOUCHED, CONTINUED, RESTARTED, POISON).take()
    assert (told["turns"], told["turns_complete"], told["turns_poison"]) == (4, 3, 1)
    assert (told["turns_interrupted"], told["turns_suspect"]) == (2, 1)
    assert (told["tokens"], told["tokens_kept"], told["tokens_regenerated"]) == (460, 140, 30)
    assert told["replays"] == 4
    assert told["replays_by_reason"] == {"reset": 2, "fenced": 1, "eof": 1}
    assert told["replays_by_way"] == {"continued": 2, "restarted": 2}
    assert told["restarts_by_reason"] == {"version moved": 1, "drift at the seam": 1}


def test_a_step_tells_the_share_of_mixed_versions_and_of_those_that_nobody_knows() -> None:
    unknown = account(turn(9, attempt(End.COMPLETE, made=9), versions=(Span("7.1", 0, 4),)))
    told = counted(UNTOUCHED, CONTINUED, RESTARTED, POISON, unknown).take()
    assert told["mixed_version_share"] == 1 / 4
    assert told["unknown_version_share"] == 1 / 4


def test_a_step_shows_the_bias_interrupted_samples_beside_the_others() -> None:
    shorter = account(turn(60, attempt(End.COMPLETE, made=60)))
    told = counted(UNTOUCHED, shorter, CONTINUED, RESTARTED, POISON).take()
    assert told["length_interrupted"] == {
        "count": 2,
        "mean": 175.0,
        "p50": 50,
        "p90": 300,
        "p99": 300,
        "max": 300,
    }
    assert told["length_uninterrupted"]["mean"] == 80.0
    assert told["length_ratio"] == 175 / 80
    assert told["gap_s"]["max"] == 2.0


def test_each_step_begins_at_nothing_and_metrics_go_on() -> None:
    numbers = counted(CONTINUED)
    assert numbers.take()["turns"] == 1
    empty = numbers.take()
    assert (empty["turns"], empty["mixed_version_share"], empty["length_ratio"]) == (0, None, None)
    numbers.add(UNTOUCHED)
    assert numbers.take()["turns"] == 1
    text = metrics.text(numbers.ever)
    assert 'relight_replay_turns_total{outcome="complete",interrupted="yes"} 1' in text
    assert 'relight_replay_turns_total{outcome="complete",interrupted="no"} 1' in text


SAMPLE = re.compile(r'^(\w+)(?:\{(?:\w+="[^"\n]*",?)+\})? (\S+)$')


def test_metrics_are_well_formed_and_are_those_of_the_table() -> None:
    text = metrics.text(counted(UNTOUCHED, CONTINUED, RESTARTED, POISON).ever)
    names: set[str] = set()
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        sample = SAMPLE.match(line)
        assert sample is not None, line
        assert float(sample[2]) >= 0.0
        names.add(re.sub(r"_(bucket|sum|count)$", "", sample[1]))
    assert names == {metric.name for metric in metrics.METRICS}
    for metric in metrics.METRICS:
        ends = ("_total",) if metric.kind == "counter" else ("_seconds", "_tokens")
        assert metric.name.startswith("relight_replay_")
        assert metric.name.endswith(ends)
        assert text.count(f"# TYPE {metric.name} {metric.kind}\n") == 1
        assert text.count(f"# HELP {metric.name} {metric.help}\n") == 1
        assert (metric.bounds != ()) is (metric.kind == "histogram")


def test_a_histogram_counts_each_sample_in_every_bucket_above_it() -> None:
    text = metrics.text(counted(UNTOUCHED, CONTINUED, RESTARTED).ever)
    buckets = [
        int(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith('relight_replay_sample_tokens_bucket{interrupted="yes"')
    ]
    assert len(buckets) == len(metrics.TOKENS) + 1
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2
    assert 'relight_replay_sample_tokens_sum{interrupted="yes"} 350\n' in text
    assert "relight_replay_gap_seconds_count 2\n" in text


def test_every_value_of_a_label_is_of_a_fixed_set() -> None:
    book = counted(UNTOUCHED, CONTINUED, RESTARTED, POISON).ever
    allowed = {*map(str, End), *map(str, Outcome), "continued", "restarted", "again", "yes", "no"}
    for metric in metrics.METRICS:
        for values in metric.read(book):
            assert {str(value) for value in values} <= allowed
