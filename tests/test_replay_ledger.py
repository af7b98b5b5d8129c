"""The ledger: whatever breaks wherever, the turn equals the uninterrupted one, and nothing is guessed."""

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.agents.replay import wire
from relight.agents.replay.ledger import Ask, Ledger, Policy
from relight.agents.replay.params import continued, derived_seed, rules
from relight.agents.replay.sse import Events
from relight.agents.replay.strand import Malformed
from relight.agents.replay.turn import Span
from relight.agents.replay.wire import Delta
from relight.agents.stub.tokens import reference
from relight.events.errors import UsageError
from relight.events.version import Version

V1, V2 = Version(7, 1), Version(7, 2)
PROMPT = [5, 6, 7]


def served(ask: Ask, *, digest: str = "w", interval: int = 1, version: str = "7.1") -> Iterator[bytes]:
    """What an engine streams for `ask`: one event for each `interval` tokens, then [DONE]."""
    cap = ask.sampling_params["max_tokens"]
    ids, logprobs = reference(digest, ask.token_ids, cap)
    for start in range(0, cap, interval):
        end = min(cap, start + interval)
        content = [
            {
                "token_id": token,
                "logprob": logprob,
                "rank": 1,
                "top_logprobs": [{"token_id": token, "logprob": logprob}],
            }
            for token, logprob in zip(ids[start:end], logprobs[start:end], strict=True)
        ]
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": ids[start:end],
            "logprobs": {"content": content},
            "finish_reason": "length" if end == cap else None,
            "weight_versions": [{"version": version, "start": 0, "end": cap}] if end == cap else None,
        }
        yield b"data: " + msgspec.json.encode({"request_id": "r", "choices": [choice]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def deltas(events: Iterator[bytes]) -> Iterator[Delta]:
    for event in events:
        payload = event[6:-2]
        if payload != b"[DONE]":
            yield from wire.ranked.decode(payload).choices


def delta(**fields: Any) -> Delta:
    """A delta as the wire has it."""
    return msgspec.convert({"index": 0, **fields}, type=wire.RankedDelta)


def scored(*ids: int) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": -0.5} for token in ids]}


def params(**changes: Any) -> dict[str, Any]:
    return {"max_tokens": 8, "temperature": 0.0, "logprobs": 1, **changes}


def kept(*ids: int, doubt: str = "", policy: Policy | None = None, **changes: Any) -> Ledger:
    """A ledger whose first attempt brought `ids` at 7.1 and broke."""
    ledger = Ledger(PROMPT, params(**changes), policy=policy or Policy())
    ledger.ask(attempt=0, version="7.1")
    ledger.feed(delta(token_ids=list(ids), logprobs=scored(*ids)))
    ledger.close(certain=None if doubt else V1, floor=V1, doubt=doubt)
    return ledger


@given(
    length=st.integers(1, 40),
    breaks=st.lists(st.integers(0, 40), max_size=4),
    cuts=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    interval=st.integers(1, 5),
    restart=st.booleans(),
)
def test_every_cut_of_every_stream_in_any_chunking_ends_equal_to_the_uninterrupted_one(
    length: int, breaks: list[int], cuts: list[int], interval: int, restart: bool
) -> None:
    ledger = Ledger(PROMPT, params(max_tokens=length), policy=Policy(restart=restart))
    attempt = 0
    while not ledger.settle():
        ask = ledger.ask(attempt=attempt, version="7.1")
        assert restart is False or ask.kept == 0
        assert len(ask.token_ids) == len(PROMPT) + ask.kept
        assert ask.sampling_params["max_tokens"] == length - ask.kept
        body = b"".join(served(ask, interval=interval))
        if attempt < len(breaks):
            body = body[: breaks[attempt] * 60]
        feed(ledger, body, cuts)
        ledger.close(certain=V1, floor=V1)
        attempt += 1
    (choice,) = ledger.choices()
    assert (choice.token_ids, choice.logprobs) == reference("w", PROMPT, length)
    assert choice.versions == (Span("7.1", 0, length),)
    assert choice.finish_reason == "length"
    assert choice.top_logprobs is not None
    assert [each[0].token_id for each in choice.top_logprobs] == choice.token_ids


@pytest.mark.parametrize("interval", [1, 3])
def test_a_cut_at_each_single_byte_of_a_stream_ends_equal_to_the_uninterrupted_one(interval: int) -> None:
    length = 9
    whole = reference("w", PROMPT, length)
    body = b"".join(served(Ledger(PROMPT, params(max_tokens=length)).ask(attempt=0, version="7.1")))
    for cut in range(len(body) + 1):
        ledger = Ledger(PROMPT, params(max_tokens=length))
        first = ledger.ask(attempt=0, version="7.1")
        feed(ledger, b"".join(served(first, interval=interval))[:cut], [cut or 1])
        ledger.close(certain=V1, floor=V1)
        if not ledger.settle():
            feed(ledger, b"".join(served(ledger.ask(attempt=1, version="7.1"), interval=interval)), [7])
            ledger.close(certain=V1, floor=V1)
        (choice,) = ledger.choices()
        assert (choice.token_ids, choice.logprobs) == whole, cut
        assert (choice.finish_reason, choice.versions) == ("length", (Span("7.1", 0, length),)), cut
        assert ledger.taken == length, cut


@given(
    breaks=st.lists(st.integers(0, 30), max_size=3),
    stop=st.integers(0, 20),
    least=st.integers(0, 12),
    interval=st.integers(1, 4),
    as_eos=st.booleans(),
)
def test_stop_tokens_ends_of_sequence_and_least_lengths_hold_across_every_cut(
    breaks: list[int], stop: int, least: int, interval: int, as_eos: bool
) -> None:
    cap = 24
    ids, _ = reference("w", PROMPT, cap)
    token = ids[stop]
    ends = [place + 1 for place, each in enumerate(ids) if each == token and place + 1 >= least]
    length = min([*ends, cap])
    asked = params(max_tokens=cap, min_tokens=least, **({} if as_eos else {"stop_token_ids": [token]}))
    ledger = Ledger(PROMPT, asked, eos=token if as_eos else None)
    attempt = 0
    while not ledger.settle():
        ask = ledger.ask(attempt=attempt, version="7.1")
        assert ask.sampling_params["max_tokens"] == cap - ask.kept
        assert ask.sampling_params["min_tokens"] == max(0, least - ask.kept)
        rest = ids[ask.kept : length]
        if attempt < len(breaks):
            rest = rest[: breaks[attempt]]
        for start in range(0, len(rest), interval):
            part = rest[start : start + interval]
            ledger.feed(delta(token_ids=part, logprobs=scored(*part)))
        ledger.close(certain=V1, floor=V1)
        attempt += 1
    (choice,) = ledger.choices()
    assert choice.token_ids == ids[:length]
    assert choice.finish_reason == ("stop" if length in ends else "length")
    assert attempt <= len(breaks) + 1


@given(
    deaths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=4),
    same=st.booleans(),
    restart=st.booleans(),
)
def test_each_token_has_the_version_that_sampled_it_or_all_have_one(
    deaths: list[tuple[int, int]], same: bool, restart: bool
) -> None:
    """Each attempt is on weights of a version of its own or of the last one's, and dies after some tokens."""
    length, step = 12, 0
    ledger = Ledger(PROMPT, params(max_tokens=length), policy=Policy(same=same, restart=restart))
    sampled_by: list[int] = []
    attempt = 0
    while not ledger.settle():
        made, moves = deaths[attempt] if attempt < len(deaths) else (length, 0)
        step += moves
        version = Version(7, step)
        ask = ledger.ask(attempt=attempt, version=str(version))
        new = list(range(100 * attempt, 100 * attempt + min(made, length - ask.kept)))
        for token in new:
            ledger.feed(delta(token_ids=[token], logprobs=scored(token)))
        ledger.close(certain=version, floor=version)
        if new or ask.kept:
            sampled_by = [*sampled_by[: ask.kept], *[step] * len(new)]
        attempt += 1
    (choice,) = ledger.choices()
    told = [int(span.version.partition(".")[2]) for span in choice.versions for _ in range(*span[1:])]
    assert told == sampled_by
    assert [span.start for span in choice.versions[1:]] == [span.end for span in choice.versions[:-1]]
    if same or restart:
        assert len(choice.versions) == 1


def feed(ledger: Ledger, body: bytes, cuts: list[int]) -> None:
    """Feed a body, torn at `cuts`."""
    events, at, turn = Events(), 0, 0
    while at < len(body):
        size = cuts[turn % len(cuts)]
        for payload in events.feed(body[at : at + size]):
            if payload != b"[DONE]":
                for each in wire.ranked.decode(payload).choices:
                    ledger.feed(each)
        at, turn = at + size, turn + 1


@given(
    lines=st.lists(st.binary(min_size=1).filter(lambda b: not set(b) & {10, 13}), min_size=1, max_size=8),
    newline=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    note=st.sampled_from([b": note", b"", b"data: one"]),
    cuts=st.lists(st.integers(1, 60), min_size=1),
)
def test_events_are_the_same_however_the_bytes_are_torn(
    lines: list[bytes], newline: bytes, note: bytes, cuts: list[int]
) -> None:
    above = note + newline if note else b""
    body = b"".join(above + b"data: " + line + newline * 2 for line in lines) + b"data: torn"
    if note.startswith(b"data"):
        lines = [b"one\n" + line for line in lines]
    events, found, at, turn = Events(), list[bytes](), 0, 0
    while at < len(body):
        size = cuts[turn % len(cuts)]
        found += events.feed(body[at : at + size])
        at, turn = at + size, turn + 1
    assert found == lines


# --- what is asked for next ----------------------------------------------------------------------------


def test_a_continuation_asks_for_what_is_left_and_the_callers_parameters_stay_as_they_are() -> None:
    given_params = params(max_tokens=64, min_tokens=10, seed=3, stop_token_ids=[1])
    before = copy.deepcopy(given_params)
    ledger = Ledger(PROMPT, given_params)
    assert ledger.ask(attempt=0, version="7.1").sampling_params == before
    ledger.feed(delta(token_ids=list(range(10, 50)), logprobs=scored(*range(10, 50))))
    ledger.close(certain=V1, floor=V1)
    ask = ledger.ask(attempt=1, version="7.1")
    assert ask.token_ids == [*PROMPT, *range(10, 50)]
    assert ask.sampling_params == {
        **before,
        "max_tokens": 24,
        "min_tokens": 0,
        "seed": derived_seed(3, 1),
    }
    assert given_params == before


def test_a_derived_seed_depends_on_seed_and_attempt_and_fits_what_engines_take() -> None:
    seeds = {derived_seed(seed, attempt) for seed in range(20) for attempt in range(1, 20)}
    assert len(seeds) == 20 * 19
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_without_a_cap_none_is_made_up() -> None:
    asked = continued({"max_tokens": None, "min_tokens": 0}, kept=9, attempt=1)
    assert asked == {"max_tokens": None, "min_tokens": 0}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n": 2}, "n > 1"),
        ({"structured_outputs": {"json": {}}}, "guided decoding (structured_outputs)"),
        ({"guided_regex": "a+"}, "guided decoding (guided_*)"),
        ({"response_format": {"type": "json_object"}}, "guided decoding (response_format)"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"thinking_token_budget": 0}, "thinking budget"),
        ({"bad_words": ["no"]}, "bad words across the seam"),
        ({"stop": "."}, "stop strings without a tokenizer"),
        ({"stop": ["."]}, "stop strings without a tokenizer"),
    ],
)
def test_what_would_change_the_distribution_is_replayed_and_says_so(
    changes: dict[str, Any], why: str
) -> None:
    ask = kept(1, 2, **changes).ask(attempt=1, version="7.1")
    assert (ask.kept, ask.restarted, ask.token_ids) == (0, why, PROMPT)
    assert ask.sampling_params == params(**changes)


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"n": None},
        {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0},
        {"structured_outputs": None, "guided_json": None, "bad_words": [], "stop": [], "stop_token_ids": [3]},
        {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "logit_bias": {"3": 1.0}, "ignore_eos": True},
    ],
)
def test_neutral_values_are_continued(neutral: dict[str, Any]) -> None:
    assert kept(1, 2, **neutral).ask(attempt=1, version="7.1").kept == 2


def test_uncertain_versions_are_replayed_and_say_so() -> None:
    ask = kept(1, 2, doubt="synced under way").ask(attempt=1, version="7.1")
    assert ask.kept == 0
    assert ask.restarted is not None
    assert "synced under way" in ask.restarted


def test_routing_records_of_one_pass_forbid_a_continuation() -> None:
    ask = kept(1, 2, policy=Policy(keep_routing=False)).ask(attempt=1, version="7.1")
    assert ask.restarted == "routing records are to be of one pass"


def test_one_version_only_replays_when_the_version_moved_and_continues_when_it_did_not() -> None:
    same = Policy(same=True)
    assert kept(1, 2, policy=same).ask(attempt=1, version="7.1").kept == 2
    moved = kept(1, 2, policy=same).ask(attempt=1, version="7.2")
    assert (moved.kept, moved.restarted) == (0, "version moved from 7.1 to 7.2")
    assert kept(1, 2).ask(attempt=1, version="7.2").kept == 2


def test_a_replay_keeps_the_old_tokens_until_its_first_one_comes() -> None:
    ledger = kept(1, 2, policy=Policy(restart=True))
    ledger.ask(attempt=1, version="7.1")
    assert ledger.choices()[0].token_ids == [1, 2]
    ledger.close(certain=V1, floor=V1)
    ledger.ask(attempt=2, version="7.1")
    ledger.feed(delta(token_ids=[3], logprobs=scored(3)))
    ledger.close(certain=V2, floor=V2)
    (choice,) = ledger.choices()
    assert (choice.token_ids, choice.versions) == ([3], (Span("7.2", 0, 1),))


def test_tokens_that_came_without_their_logprobs_are_dropped_and_the_scored_ones_are_kept() -> None:
    ledger = kept(1, 2)
    ledger.ask(attempt=1, version="7.1")
    ledger.feed(delta(token_ids=[3], logprobs=scored(3)))
    with pytest.raises(Malformed, match="2 token ids with 0 logprobs"):
        ledger.feed(delta(token_ids=[4, 5], logprobs=None))
    ledger.close(certain=V1, floor=V1)
    ask = ledger.ask(attempt=2, version="7.1")
    assert (ask.token_ids, ask.kept) == ([*PROMPT, 1, 2, 3], 3)


def test_kept_tokens_are_scored_against_weights_of_their_own_version_only() -> None:
    ledger = kept(1, 2)
    ledger.ask(attempt=1, version="7.2")
    ledger.feed(delta(token_ids=[3], logprobs=scored(3)))
    ledger.close(certain=V2, floor=V2)
    assert ledger.scored_at("7.1") == [(3, 1, -0.5), (4, 2, -0.5)]
    assert ledger.scored_at("7.2") == [(5, 3, -0.5)]
    assert ledger.scored_at("7.3") == []


def test_tokens_that_are_not_trusted_are_replayed_and_say_why() -> None:
    ledger = kept(1, 2)
    ledger.distrust("drift at the seam")
    ask = ledger.ask(attempt=1, version="7.1")
    assert (ask.kept, ask.restarted) == (0, "drift at the seam")
    ledger.feed(delta(token_ids=[8], logprobs=scored(8)))
    ledger.close(certain=V1, floor=V1)
    assert ledger.ask(attempt=2, version="7.1").kept == 1
    assert ledger.taken == 3


# --- ending locally ------------------------------------------------------------------------------------


def test_a_turn_at_its_cap_ends_without_another_request() -> None:
    ledger = kept(*range(8))
    assert ledger.settle()
    assert ledger.choices()[0].finish_reason == "length"


def test_a_turn_at_a_stop_token_ends_without_another_request() -> None:
    ledger = kept(4, 9, stop_token_ids=[9])
    assert ledger.settle()
    assert (ledger.choices()[0].finish_reason, ledger.choices()[0].stop_reason) == ("stop", 9)


def test_a_turn_at_its_end_of_sequence_ends_unless_that_is_to_be_ignored() -> None:
    for ignored in (False, True):
        ledger = Ledger(PROMPT, params(ignore_eos=ignored), eos=9)
        ledger.ask(attempt=0, version="7.1")
        ledger.feed(delta(token_ids=[9], logprobs=scored(9)))
        ledger.close(certain=V1, floor=V1)
        assert ledger.settle() is not ignored


def test_a_turn_at_its_cap_whose_versions_nobody_knows_is_replayed() -> None:
    ledger = kept(*range(8), doubt="the bus is away")
    assert not ledger.settle()
    assert ledger.ask(attempt=1, version="7.1").kept == 0


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({"token_ids": None}, False),
        ({"token_ids": None, "finish_reason": "stop"}, False),
        ({"token_ids": [1, 2], "logprobs": scored(1)}, False),
        ({"token_ids": [1, 2], "logprobs": None}, False),
        ({"token_ids": [1], "logprobs": {"content": None}}, False),
        ({"token_ids": [1, 2], "logprobs": scored(2, 1)}, False),
        ({"token_ids": [1], "logprobs": scored(1), "sampling_mask": []}, False),
        ({"token_ids": [], "finish_reason": "stop"}, True),
        ({"token_ids": list(range(9)), "logprobs": scored(*range(9))}, True),
        ({"index": 1, "token_ids": [1], "logprobs": scored(1)}, True),
        (
            {
                "token_ids": [1, 2],
                "logprobs": scored(1, 2),
                "finish_reason": "stop",
                "weight_versions": [{"version": "7.1", "start": 0, "end": 3}],
            },
            True,
        ),
        (
            {
                "token_ids": [1, 2],
                "logprobs": scored(1, 2),
                "finish_reason": "stop",
                "weight_versions": [{"version": "7.1", "start": 1, "end": 2}],
            },
            True,
        ),
    ],
)
def test_what_contradicts_itself_is_refused_and_nothing_of_it_is_taken(
    fields: dict[str, Any], whole: bool
) -> None:
    ledger = Ledger(PROMPT, params())
    ledger.ask(attempt=0, version="7.1")
    with pytest.raises(Malformed) as refused:
        ledger.feed(delta(**fields))
    assert refused.value.whole is whole
    assert ledger.choices()[0].token_ids == []
    assert not ledger.complete


def test_nothing_is_taken_after_a_finish() -> None:
    ledger = Ledger(PROMPT, params())
    ledger.ask(attempt=0, version="7.1")
    ledger.feed(delta(token_ids=[1], logprobs=scored(1), finish_reason="stop"))
    with pytest.raises(Malformed, match="after the finish") as refused:
        ledger.feed(delta(token_ids=[2], logprobs=scored(2)))
    assert refused.value.whole
    assert ledger.choices()[0].token_ids == [1]


def test_rejecting_an_attempt_keeps_what_earlier_ones_brought() -> None:
    ledger = kept(1, 2)
    ledger.ask(attempt=1, version="7.1")
    ledger.feed(delta(token_ids=[3, 4], logprobs=scored(3, 4)))
    ledger.reject()
    assert ledger.choices()[0].token_ids == [1, 2]
    assert ledger.ask(attempt=2, version="7.1").kept == 2


def test_parameters_that_a_stream_cannot_answer_are_refused() -> None:
    with pytest.raises(UsageError, match="prompt_logprobs"):
        rules({"prompt_logprobs": 0}, tokenizer=False)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"max_tokens": "x"}, r"sampling_params: .*`\$\.max_tokens`"),
        ({"stop": 3}, r"sampling_params: .*`\$\.stop`"),
        ({"stop_token_ids": ["x"]}, r"sampling_params: .*`\$\.stop_token_ids\[0\]`"),
        ({"n": 10**9}, "n 1000000000 is more than 16384"),
    ],
)
def test_parameters_that_cannot_be_reckoned_with_are_refused(params: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        rules(params, tokenizer=False)


def test_a_number_of_choices_that_is_none_is_left_to_the_engine() -> None:
    ledger = Ledger([1], {"n": -1})
    assert not ledger.settle()
    assert ledger.ask(attempt=0, version="0.0").sampling_params == {"n": -1}


# --- versions ------------------------------------------------------------------------------------------


def finished(*spans: tuple[str, int, int], ids: list[int]) -> Delta:
    labels = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return delta(token_ids=ids, logprobs=scored(*ids), finish_reason="stop", weight_versions=labels)


def test_the_engines_own_spans_are_shifted_by_the_kept_tokens_and_joined() -> None:
    ledger = kept(1, 2)
    ledger.ask(attempt=1, version="7.1")
    ledger.feed(finished(("7.1", 0, 1), ("7.2", 1, 3), ids=[3, 4, 5]))
    assert ledger.told
    ledger.close(certain=None, floor=V1)
    assert ledger.choices()[0].versions == (Span("7.1", 0, 3), Span("7.2", 3, 5))


def test_a_label_that_is_no_version_counts_as_nothing_where_the_version_is_certain() -> None:
    for certain, version in ((V1, "7.1"), (None, "default")):
        ledger = Ledger(PROMPT, params())
        ledger.ask(attempt=0, version="7.1")
        ledger.feed(finished(("default", 0, 2), ids=[3, 4]))
        assert not ledger.told
        ledger.close(certain=certain, floor=V1)
        assert ledger.choices()[0].versions == (Span(version, 0, 2),)


def test_a_label_below_the_routes_version_is_refused() -> None:
    ledger = Ledger(PROMPT, params())
    ledger.ask(attempt=0, version="7.2")
    ledger.feed(finished(("7.1", 0, 2), ids=[3, 4]))
    with pytest.raises(Malformed, match=r"7\.1 on a route of 7\.2"):
        ledger.close(certain=V2, floor=V2)


def test_one_version_only_is_not_complete_with_two() -> None:
    ledger = Ledger(PROMPT, params(), policy=Policy(same=True))
    ledger.ask(attempt=0, version="7.1")
    ledger.feed(finished(("7.1", 0, 1), ("7.2", 1, 2), ids=[3, 4]))
    ledger.close(certain=None, floor=V1)
    assert ledger.moved
    ledger.restart()
    assert not ledger.complete
    assert ledger.ask(attempt=1, version="7.2").token_ids == PROMPT


# --- several choices, masks, routing records, stop strings -----------------------------------------------


def test_several_choices_are_kept_apart_and_replayed_together() -> None:
    ledger = Ledger(PROMPT, params(n=2))
    ledger.ask(attempt=0, version="7.1")
    ledger.feed(delta(index=1, token_ids=[8], logprobs=scored(8), finish_reason="stop"))
    ledger.feed(delta(token_ids=[3], logprobs=scored(3)))
    ledger.close(certain=V1, floor=V1)
    assert [choice.token_ids for choice in ledger.choices()] == [[3], [8]]
    assert ledger.ask(attempt=1, version="7.1").restarted == "n > 1"
    ledger.feed(delta(token_ids=[4], logprobs=scored(4), finish_reason="stop"))
    assert not ledger.complete
    ledger.feed(delta(index=1, token_ids=[5], logprobs=scored(5), finish_reason="stop"))
    assert ledger.complete
    assert [choice.token_ids for choice in ledger.choices()] == [[4], [5]]


def test_masks_are_joined_and_routing_records_replaced() -> None:
    ledger = Ledger(PROMPT, params(logprobs=None))
    ledger.ask(attempt=0, version="7.1")
    ledger.feed(delta(token_ids=[3], sampling_mask=[[3, 4]], routed_experts="prompt+1"))
    ledger.close(certain=V1, floor=V1)
    ledger.ask(attempt=1, version="7.1")
    ledger.feed(delta(token_ids=[5], sampling_mask=[[5]], routed_experts="prompt+2", finish_reason="stop"))
    (choice,) = ledger.choices()
    assert choice.sampling_mask == [[3, 4], [5]]
    assert choice.routed_experts == "prompt+2"
    assert choice.logprobs is None


class Letters:
    """A tokenizer in which each token is one letter."""

    eos_token_id = None

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(chr(token) for token in token_ids)


def test_a_stop_string_across_the_seam_is_found_with_a_tokenizer() -> None:
    ledger = Ledger(PROMPT, params(stop=["END"]), tokenizer=Letters())
    ledger.ask(attempt=0, version="7.1")
    first = [ord(letter) for letter in "aE"]
    ledger.feed(delta(token_ids=first, logprobs=scored(*first)))
    ledger.close(certain=V1, floor=V1)
    assert ledger.ask(attempt=1, version="7.1").kept == 2
    rest = [ord(letter) for letter in "NDxy"]
    ledger.feed(delta(token_ids=rest, logprobs=scored(*rest)))
    assert ledger.complete
    (choice,) = ledger.choices()
    assert "".join(map(chr, choice.token_ids)) == "aEND"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "END")
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 4


def test_a_stop_string_wholly_behind_the_seam_is_the_engines_to_find() -> None:
    ledger = Ledger(PROMPT, params(stop=["END"]), tokenizer=Letters())
    ledger.ask(attempt=0, version="7.1")
    ledger.feed(delta(token_ids=[97], logprobs=scored(97)))
    ledger.close(certain=V1, floor=V1)
    ledger.ask(attempt=1, version="7.1")
    rest = [ord(letter) for letter in "xEND"]
    ledger.feed(delta(token_ids=rest, logprobs=scored(*rest)))
    assert not ledger.complete
