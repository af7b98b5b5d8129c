"""Texts over attempts, without a wire: what a call may ask for, and which bytes go out of what comes."""

import json
from typing import Any

import msgspec
import pytest

from relight.agents.replay.strand import Malformed
from relight.agents.replay.texts import relay, words
from relight.agents.replay.texts.asked import Asked, read
from relight.agents.replay.texts.relay import Relay
from relight.agents.replay.texts.script import NO_IDS, PARSED, Script
from relight.agents.replay.texts.whole import whole
from relight.agents.replay.texts.words import Entry, Said
from relight.events.version import Version

V = Version(7, 1)
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def asked(endpoint: Any = "chat", **fields: Any) -> Asked:
    base: dict[str, Any] = dict(CHAT) if endpoint == "chat" else {"prompt": "Hello", "max_tokens": 4}
    return read(endpoint, msgspec.json.encode({**base, "stream": True, **fields}))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "stop": [], "tools": None, "n": 1}, None),
        ({"temperature": 0.7, "logit_bias": {"5": 1}, "seed": 3, "logprobs": True, "top_logprobs": 5}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, None),
        ({"n": 2}, "n > 1"),
        ({"stop": "\n\n"}, "stop strings without a tokenizer"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "guided decoding (response_format)"),
        ({"guided_regex": "a+"}, "guided decoding (guided_*)"),
        ({"tools": [{"type": "function"}]}, "the state of a tool call's parser"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "images, audio or video in the prompt",
        ),
    ],
)
def test_what_forbids_to_go_on_is_known_before_anything_is_sent(
    fields: dict[str, Any], why: str | None
) -> None:
    assert asked(**fields).why_replayed == why


def test_completions_name_their_own_reasons() -> None:
    assert asked("completions").why_replayed is None
    assert asked("completions", prompt=[1, 2, 3]).why_replayed is None
    assert asked("completions", prompt=[[1, 2], [3]]).why_replayed == "several prompts"
    assert asked("completions", prompt=["a", "b"], n=2).choices == 4
    assert asked("completions", best_of=2).why_replayed == "best_of"
    assert asked("completions", suffix="x").why_replayed == "suffix"


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b'{"max_tokens": "x"}', b'{"messages": [1], "stop": 7}']
)
def test_a_body_that_makes_no_sense_is_the_engines_to_refuse(content: bytes) -> None:
    found = read("chat", content)
    assert found.why_replayed is not None
    assert found.content == content


def test_a_completion_has_a_budget_though_it_names_none() -> None:
    assert read("completions", b'{"prompt": "x"}').params == {"max_tokens": 16}
    assert read("chat", b'{"messages": [], "max_completion_tokens": 9, "max_tokens": 5}').params == {
        "max_tokens": 9
    }
    assert read("chat", b'{"messages": []}').params == {}


def test_token_ids_that_nobody_asked_for_are_taken_out_of_the_bytes_alone() -> None:
    payload = (
        rb'{"choices":[{"text":"say \"token_ids\":[1,2] and token_ids","prompt_token_ids":[1,2],'
        rb'"token_ids":[],"top_logprobs":[{"token_ids":-0.5}]}],"prompt_token_ids":null}'
    )
    found = json.loads(words.without_ids(payload))
    (choice,) = found["choices"]
    assert choice["text"] == 'say "token_ids":[1,2] and token_ids'
    assert choice["prompt_token_ids"] is choice["token_ids"] is found["prompt_token_ids"] is None
    assert choice["top_logprobs"] == [{"token_ids": -0.5}]


def chunk(token_ids: list[int] | None, text: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    content = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    return msgspec.json.encode({**content, "choices": [{**choice, "token_ids": token_ids, **more}]})


def role(attempt: int = 1) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ids = {"id": f"chatcmpl-{attempt}", "created": 5, "model": "m", "prompt_token_ids": [1, 2]}
    return msgspec.json.encode({**ids, "choices": [choice]})


def feed(script: Script | Relay, *payloads: bytes) -> None:
    for payload in payloads:
        for delta in words.read(payload).choices:
            script.feed(delta)


def begin(script: Script) -> Script:
    script.ask(attempt=0, version=str(V))
    return script


def texts(payloads: list[bytes]) -> list[str]:
    choices = [json.loads(payload)["choices"][0] for payload in payloads]
    return [choice["delta"].get("content") for choice in choices]


def test_nothing_goes_out_before_the_first_token() -> None:
    script = begin(Script(asked()))
    feed(script, role())
    assert script.take() == []
    feed(script, chunk([3], "a"))
    assert texts(script.take()) == ["", "a"]


def test_one_role_and_one_id_over_two_attempts() -> None:
    script = begin(Script(asked()))
    feed(script, role(), chunk([3], "a"))
    sent = script.take()
    script.close(certain=V, floor=V)
    ask = script.ask(attempt=1, version=str(V))
    assert (ask.token_ids, ask.kept) == ([1, 2, 3], 1)
    assert script.kept.text == "a"
    script.feed(Said(index=0, text="b", token_ids=[4]))
    script.feed(Said(index=0, text="c", token_ids=[5], finish_reason="stop"))
    assert script.complete
    sent += [*script.take(), *script.last()]
    assert texts(sent) == ["", "a", "b", "c"]
    told = [json.loads(payload) for payload in sent]
    assert {each["id"] for each in told} == {"chatcmpl-1"}
    assert {each["created"] for each in told} == {5}
    assert [each["choices"][0]["finish_reason"] for each in told] == [None, None, None, "stop"]


def test_versions_that_nobody_knows_do_not_end_a_text_that_tells_none() -> None:
    script = begin(Script(asked()))
    feed(script, role(), chunk([3], "a"))
    script.close(certain=None, floor=V, doubt="weights were synced under way")
    assert script.ask(attempt=1, version=str(V)).kept == 1
    script.distrust("refused to be continued")
    script.close(certain=None, floor=V, doubt="weights were synced under way")
    assert script.ask(attempt=2, version=str(V)).kept == 0


def test_a_role_alone_is_not_given_twice() -> None:
    script = begin(Script(asked()))
    feed(script, role(1))
    script.ask(attempt=1, version=str(V))
    feed(script, role(2), chunk([3], "a"))
    assert texts(script.take()) == ["", "a"]


def test_the_usage_is_of_the_whole_answer_behind_a_seam() -> None:
    script = begin(Script(asked(stream_options={"include_usage": True, "continuous_usage_stats": True})))
    feed(script, role(), chunk([3], "a"))
    script.close(certain=V, floor=V)
    script.ask(attempt=1, version=str(V))
    script.take()
    script.feed(Said(index=0, text="b", token_ids=[4]))
    (told,) = script.take()
    assert json.loads(told)["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    script.feed(Said(index=0, text="", token_ids=[5], finish_reason="stop"))
    assert json.loads(script.last()[-1])["usage"]["completion_tokens"] == 3


def test_an_answer_waits_for_the_usage_that_its_engine_tells() -> None:
    script = begin(Script(asked(stream=False)))
    feed(script, role(), chunk([3], "a", finish_reason="stop"))
    assert not script.complete
    usage = (
        b'{"id":"chatcmpl-1","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}'
    )
    feed(script, usage)
    assert script.complete
    assert script.last()[-1] == usage


def test_a_turn_at_its_cap_ends_without_the_finish_that_was_lost() -> None:
    script = begin(Script(asked()))
    feed(script, role(), chunk([3, 4, 5, 6], "abcd"))
    script.close(certain=V, floor=V)
    assert script.settle()
    assert [json.loads(each)["choices"][0]["finish_reason"] for each in script.last()] == ["length"]


def test_an_end_that_nobody_asked_for_keeps_its_text_and_loses_its_finish() -> None:
    script = begin(Script(asked()))
    feed(script, role(), chunk([3], "a", finish_reason="abort"))
    (_, told) = script.take()
    assert (
        json.loads(told)["choices"][0] | {"delta": {"content": "a"}, "finish_reason": None}
        == (json.loads(told)["choices"][0])
    )
    assert not script.complete


def test_a_reasoning_parsers_state_is_not_continued() -> None:
    script = begin(Script(asked()))
    feed(script, role(), chunk([3], "", delta={"reasoning": "hm"}))
    assert script.why_replayed("") == PARSED
    assert len(script.take()) == 2


def test_text_without_ids_goes_out_and_is_not_continued() -> None:
    script = begin(Script(asked()))
    feed(script, role(), chunk(None, "a"), chunk(None, ""), chunk(None, "b", finish_reason="stop"))
    assert script.complete
    assert texts([*script.take(), *script.last()]) == ["", "a", "", "b"]
    assert script.why_replayed("") == NO_IDS


def test_logprobs_that_are_missing_are_never_passed_on() -> None:
    script = begin(Script(asked(logprobs=True)))
    one = {"content": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]}
    feed(script, role(), chunk([3], "a", logprobs=one))
    script.take()
    with pytest.raises(Malformed, match="2 token ids with 1 logprobs"):
        feed(script, chunk([4, 5], "bc", logprobs=one))
    assert script.take() == []


def test_what_a_rejected_attempt_brought_goes_out_only_where_it_had_gone_already() -> None:
    script = begin(Script(asked()))
    feed(script, role(), chunk([3], "a"))
    script.close(certain=V, floor=V)
    script.take()
    script.ask(attempt=1, version=str(V))
    script.feed(Said(index=0, text="b", token_ids=[4]))
    script.reject()
    assert script.take() == []
    assert script.kept.text == "a"
    assert script.why_replayed("") is None
    script.feed(Said(index=0, text="b", token_ids=[4]))
    script.take()
    script.reject()
    assert script.why_replayed("") is not None


def test_candidates_keep_the_shape_of_their_endpoint() -> None:
    best = Entry("a", -0.5, [97])
    entry = Entry("a", -0.5, [97], [best, Entry("b", -1.0, [98])])
    plain = words.logprobs_of(
        asked("completions", logprobs=2), [entry, Entry("cd", -0.1, None, [])], offset=7
    )
    assert plain == {
        "text_offset": [7, 8],
        "token_logprobs": [-0.5, -0.1],
        "tokens": ["a", "cd"],
        "top_logprobs": [{"a": -0.5, "b": -1.0}, {}],
    }
    chat = words.logprobs_of(asked(logprobs=True, top_logprobs=1), [entry], offset=0)
    shown = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert chat == {"content": [{**shown, "top_logprobs": [shown]}]}
    assert words.logprobs_of(asked(logprobs=True), [entry], offset=0)["content"][0]["top_logprobs"] == []


def test_a_whole_answer_is_its_events_put_together() -> None:
    usage = b'{"choices":[],"usage":{"prompt_tokens":2},"system_fingerprint":"f"}'
    events = [role(), chunk([3], "a"), chunk([4], "b", finish_reason="stop", stop_reason=4), usage]
    found = json.loads(whole(asked(stream=False, return_token_ids=True), events))
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "ab"
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", 4, [3, 4])
    assert (found["prompt_token_ids"], found["system_fingerprint"]) == ([1, 2], "f")


def test_an_answer_that_only_goes_through_is_whole_when_each_choice_has_finished() -> None:
    ledger = Relay(2, why="n > 1")
    ledger.ask(attempt=0, version=str(V))
    feed(ledger, role(), chunk(None, "a", finish_reason="stop"))
    end = Said(index=0, part="end")
    with pytest.raises(Malformed, match="1 of 2"):
        ledger.feed(end)
    ledger.ask(attempt=1, version=str(V))
    feed(ledger, chunk(None, "a", finish_reason="stop"), chunk(None, "b", index=1, finish_reason="stop"))
    ledger.feed(end)
    assert ledger.complete
    assert len(ledger.take()) == 2


def test_a_whole_body_with_an_abort_in_it_is_not_whole() -> None:
    ledger = Relay(1, why="tools")
    ledger.ask(attempt=0, version=str(V))
    for delta in relay.body(b'{"choices":[{"finish_reason":"abort"}]}').choices:
        ledger.feed(delta)
    assert not ledger.complete
    ledger.ask(attempt=1, version=str(V))
    content = b'{"choices":[{"finish_reason":"tool_calls"}]}'
    for delta in relay.body(content).choices:
        ledger.feed(delta)
    assert ledger.take() == [content]
