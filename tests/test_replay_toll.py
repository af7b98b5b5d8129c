"""What ends of attempts mean for the rest of a turn, as a table; and the drift at the seam, as it is read."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from relight.agents.replay.drift import Kept, Unmeasured, largest
from relight.agents.replay.limits import BACKOFF_S, COUNTED
from relight.agents.replay.route import Key
from relight.agents.replay.toll import Toll
from relight.agents.replay.turn import End
from relight.events.ids import EngineName

A1, A2, B1, C1 = (Key(EngineName(name), life) for name, life in (("a", 1), ("a", 2), ("b", 1), ("c", 1)))

FAILURES = {
    *(End.RESET, End.EOF, End.DONE_WITHOUT_FINISH, End.ERROR_FRAME, End.ERROR_FINISH),
    *(End.SERVER_ERROR, End.IDLE, End.FENCED, End.MALFORMED),
}
"""What counts against a turn. A refused connection does not: that engine never saw it."""


def after(*ends: tuple[End, Key], most: int = 3) -> Toll:
    toll = Toll(most)
    for end, key in ends:
        toll.count(end, key, rest_s=0.0, chance=0.0)
    return toll


@pytest.mark.parametrize("end", list(End))
def test_an_end_counts_as_a_failure_or_it_does_not(end: End) -> None:
    assert after((end, A1)).failures == (end in FAILURES)
    assert (end in COUNTED) is (end in FAILURES)


@pytest.mark.parametrize(
    ("ends", "suspect", "poison"),
    [
        pytest.param([(End.RESET, A1), (End.RESET, B1)], True, False, id="two deaths"),
        pytest.param([(End.RESET, A1), (End.FENCED, A2)], True, False, id="two lives of one engine"),
        pytest.param([(End.RESET, A1), (End.RESET, A1)], False, False, id="one life dies once"),
        pytest.param([(End.RESET, A1), (End.REFUSED, B1)], False, False, id="one that never saw it"),
        pytest.param([(End.MALFORMED, A1), (End.MALFORMED, B1)], False, False, id="nothing died"),
        pytest.param([(End.WITHDRAWN, each) for each in (A1, B1, C1)], False, False, id="taken out alive"),
        pytest.param([(End.OVERLOADED, A1), (End.ABORTED, B1)], False, False, id="busy ones"),
        pytest.param([(End.EOF, A1), (End.IDLE, B1), (End.ERROR_FRAME, C1)], True, True, id="three deaths"),
    ],
)
def test_two_deaths_make_a_suspect_and_a_third_a_poison(
    ends: Sequence[tuple[End, Key]], suspect: bool, poison: bool
) -> None:
    toll = after(*ends)
    assert (toll.suspect, toll.poison) == (suspect, poison)


def test_the_bound_on_failures_is_the_callers() -> None:
    ends = [(End.RESET, A1), (End.RESET, B1), (End.RESET, C1)]
    assert after(*ends).spent
    assert not after(*ends, most=4).spent
    assert not after(*[(End.OVERLOADED, A1)] * 50).spent


def test_the_engine_that_failed_is_avoided_and_one_whose_weights_moved_is_not() -> None:
    assert after((End.RESET, A1), (End.RESET, B1)).avoid == B1
    assert after((End.VERSION_MOVED, A1)).avoid is None


def test_busy_engines_are_waited_for_longer_each_time_within_a_bound_and_not_in_step() -> None:
    toll = Toll(3)
    waits: list[float] = []
    for _ in range(2 * len(BACKOFF_S)):
        toll.count(End.OVERLOADED, A1, rest_s=0.0, chance=0.0)
        assert toll.rest_s is not None
        waits.append(toll.rest_s)
    assert waits == [*BACKOFF_S, *[BACKOFF_S[-1]] * len(BACKOFF_S)]
    toll.count(End.OVERLOADED, A1, rest_s=7.0, chance=0.5)
    assert toll.rest_s == 7.0 * 1.25


def test_only_the_first_busy_engine_is_left_for_another_at_once() -> None:
    toll = after((End.OVERLOADED, A1))
    assert toll.elsewhere
    toll.count(End.OVERLOADED, B1, rest_s=0.0, chance=0.0)
    assert not toll.elsewhere
    toll.progressed()
    toll.count(End.OVERLOADED, A1, rest_s=0.0, chance=0.0)
    assert toll.elsewhere


# --- drift ---------------------------------------------------------------------------------------------


def scored(*entries: dict[str, Any] | None) -> bytes:
    return msgspec.json.encode({"prompt_logprobs": entries, "choices": []})


def test_the_largest_difference_is_told_whatever_its_sign() -> None:
    answer = scored(None, {"5": {"logprob": -1.0}}, {"9": {"logprob": -0.5}, "6": {"logprob": -2.0}})
    assert largest(answer, [Kept(1, 5, -1.25), Kept(2, 6, -1.5)]) == 0.5


@pytest.mark.parametrize(
    "answer",
    [
        b"no json",
        b"{}",
        scored(None, None),
        scored(None),
        scored(None, {"6": {"logprob": -1.0}}),
    ],
)
def test_an_answer_that_does_not_tell_is_not_taken_for_no_difference(answer: bytes) -> None:
    with pytest.raises(Unmeasured):
        largest(answer, [Kept(1, 5, -1.0)])
