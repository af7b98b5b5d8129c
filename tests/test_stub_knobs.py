"""Each fault that the stub can be asked to play, seen from outside."""

import os
import signal
import socket
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from relight.agents.stub.launch import Stub, launch, make_model, pids_with, wait_gone
from relight.agents.stub.tokens import reference, weights_digest

PROMPT = [5, 6, 7]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", seed=1)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return make_model(tmp_path / "other", seed=2)


@pytest.fixture
def stub(model: Path) -> Iterator[Stub]:
    with launch(model) as started:
        yield started


def ids_of(events: list[Any]) -> list[int]:
    return [token for event in events if "choices" in event for token in event["choices"][0]["token_ids"]]


def wait_stopped(pid: int) -> None:
    """Until a process that is not ours is stopped; the test's own timeout is the deadline."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


def reload(stub: Stub, folder: Path, timeout_s: float = 10.0) -> int:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return stub.post("/collective_rpc", body, timeout_s=timeout_s).status


def canary(stub: Stub) -> list[int]:
    return stub.generate(PROMPT, 20).body["choices"][0]["token_ids"]


def test_unknown_knobs_are_refused_and_known_ones_are_told(stub: Stub) -> None:
    assert stub.post("/stub/knobs", {"nope": 1}).status == 400
    assert stub.post("/stub/knobs", {"reload": "nothing"}).body["reload"] == "nothing"
    assert stub.get("/stub/knobs").body["reload"] == "nothing"


def test_an_unknown_flag_ends_the_start(model: Path) -> None:
    with launch(model, "--nope", wait=False) as stub:
        assert stub.process.wait(10) == 1


def test_freeze_stops_the_core_after_exactly_so_many_tokens(stub: Stub, model: Path) -> None:
    stub.knobs(freeze_after_tokens=7)
    events = stub.stream(PROMPT, 50)
    got: list[Any] = []
    while len(ids_of(got)) < 7:
        got.append(next(events))
    wait_stopped(stub.core)
    assert ids_of(got) == reference(weights_digest(model), PROMPT, 7)[0]
    assert stub.get("/health").status == 200
    with pytest.raises(TimeoutError):
        stub.get("/is_paused", timeout_s=0.2)
    os.kill(stub.core, signal.SIGCONT)
    got += events
    assert ids_of(got) == reference(weights_digest(model), PROMPT, 50)[0]


def test_a_freeze_after_no_token_is_at_once(stub: Stub) -> None:
    stub.knobs(freeze_after_tokens=0)
    wait_stopped(stub.core)


def test_exit_ends_with_code_0_after_exactly_so_many_tokens(model: Path) -> None:
    with launch(model, "--exit-after-tokens", "9") as stub:
        events = list(stub.stream(PROMPT, 50))
        assert ids_of(events) == reference(weights_digest(model), PROMPT, 9)[0]
        assert "error" in events[-2]
        assert events[-1] == "[DONE]"
        assert stub.process.wait(10) == 0


def test_it_dies_so_many_seconds_after_the_start(model: Path) -> None:
    with launch(model, "--die-after-s", "0.1") as stub:
        assert stub.process.wait(10) == 0


def test_sigterm_can_be_ignored_by_the_whole_tree(model: Path) -> None:
    with launch(model, "--ignore-sigterm") as stub:
        os.killpg(stub.process.pid, signal.SIGTERM)
        assert len(canary(stub)) == 20


def test_a_slow_start_listens_late(model: Path) -> None:
    with launch(model, "--slow-start-s", "0.3") as stub:
        assert stub.get("/health").status == 200


def test_sigterm_while_starting_ends_the_tree(model: Path) -> None:
    with launch(model, "--slow-start-s", "60", wait=False) as stub:
        while not pids_with(f"{stub.prefix}::Worker"):
            os.sched_yield()
        core, worker = stub.core, stub.worker
        stub.process.terminate()
        assert stub.process.wait(10) == 0
        wait_gone(core)
        wait_gone(worker)


def test_a_start_can_fail_with_a_sentence_of_choice(model: Path) -> None:
    with launch(model, "--start-fails", "Free memory is less than desired.", wait=False) as stub:
        assert stub.process.wait(10) == 1
        stub.close()
        assert stub.lines == ["error: Free memory is less than desired."]
        assert pids_with(f"{stub.prefix}::") == []


def test_the_front_can_exit_while_the_core_lives_on(model: Path) -> None:
    with launch(model, "--front-exits-in-start", wait=False) as stub:
        assert stub.process.wait(10) == 1
        assert os.getpgid(stub.core) == os.getpgid(stub.worker) == stub.process.pid


def test_a_held_port_outlives_the_server(model: Path) -> None:
    with launch(model, "--hold-port") as stub:
        holder = stub.pid_of("PortHolder")
        os.killpg(stub.process.pid, signal.SIGKILL)
        stub.process.wait(10)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", stub.port))
        os.kill(holder, signal.SIGKILL)
        wait_gone(holder)
        socket.create_server(("127.0.0.1", stub.port)).close()


def test_strays_escape_the_process_group_and_sigterm(model: Path) -> None:
    with launch(model, "--strays", "2") as stub:
        strays = pids_with(f"{stub.prefix}::Stray")
        assert len(strays) == 2
        assert stub.process.pid not in {os.getpgid(pid) for pid in strays}
        stub.process.terminate()
        assert stub.process.wait(10) == 0
        for pid in strays:
            os.kill(pid, signal.SIGTERM)
        assert pids_with(f"{stub.prefix}::Stray") == strays


def test_so_much_output_blocks_only_those_who_do_not_drain(model: Path) -> None:
    with launch(model, "--print-mib", "1") as stub:
        assert len(canary(stub)) == 20
        assert sum(len(line) + 1 for line in stub.lines if line.startswith("xxx")) == 1 << 20


def test_the_harmless_shared_memory_line_is_printed(model: Path) -> None:
    with launch(model, "--shm-line-s", "0.05") as stub:
        while not any("No available shared memory broadcast block" in line for line in stub.lines):
            assert stub.get("/health").status == 200


def test_probes_can_be_late_while_tokens_go_on(stub: Stub) -> None:
    stub.knobs(probe_delay_s=30)
    for path in ("/health", "/is_paused"):
        with pytest.raises(TimeoutError):
            stub.get(path, timeout_s=0.2)
    assert len(canary(stub)) == 20


def test_generation_can_be_refused_with_retry_after(stub: Stub) -> None:
    stub.knobs(generate_status=503, retry_after_s=7)
    answer = stub.generate(PROMPT, 5)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
    assert answer.body["error"]["type"] == "ServiceUnavailableError"
    stub.knobs(generate_status=500)
    assert stub.generate(PROMPT, 5).status == 500


@pytest.mark.parametrize(
    ("fault", "ends"),
    [("error", ["error"]), ("error_done", ["error", "[DONE]"]), ("eof", []), ("abort", ["abort", "[DONE]"])],
)
def test_a_stream_breaks_after_exactly_so_many_tokens(
    stub: Stub, model: Path, fault: str, ends: list[str]
) -> None:
    stub.knobs(stream_fault=fault, stream_fault_after=6, stream_fault_skip=1, stream_fault_times=1)
    assert len(canary(stub)) == 20
    events = list(stub.stream(PROMPT, 20))
    ids, _ = reference(weights_digest(model), PROMPT, 20)
    assert ids_of(events) == ids[:6]
    tail = [event for event in events if "error" in event or event == "[DONE]" or _finish(event)]
    assert [event if event == "[DONE]" else _finish(event) or "error" for event in tail] == ends
    assert canary(stub) == ids


def _finish(event: Any) -> Any:
    return "choices" in event and event["choices"][0]["finish_reason"]


def test_a_cut_stream_resets_the_connection(stub: Stub) -> None:
    stub.knobs(stream_fault="cut", stream_fault_after=3)
    with pytest.raises((ConnectionError, IncompleteRead, OSError)):
        got = list(stub.stream(PROMPT, 20))
        raise ConnectionError(f"cut after {len(got)} events")


def test_a_hanging_stream_sends_no_further_byte(stub: Stub) -> None:
    stub.knobs(stream_fault="hang", stream_fault_after=3)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9}, "stream": True}
    with pytest.raises(TimeoutError):
        stub.post("/inference/v1/generate", body, timeout_s=0.3)


def test_a_silent_engine_answers_no_byte(stub: Stub) -> None:
    stub.knobs(stream_fault="silent")
    with pytest.raises(TimeoutError):
        stub.generate(PROMPT, 3, timeout_s=0.3)


def test_an_empty_answer_is_a_200_without_a_body(stub: Stub) -> None:
    stub.knobs(stream_fault="empty")
    assert list(stub.stream(PROMPT, 5)) == []


def test_tokens_and_logprobs_can_be_missing(stub: Stub, model: Path) -> None:
    ids, logprobs = reference(weights_digest(model), PROMPT, 10)
    stub.knobs(drop_token=4)
    assert ids_of(list(stub.stream(PROMPT, 10))) == ids[:4] + ids[5:]
    stub.knobs(drop_token=None, short_logprobs=True)
    choice = stub.generate(PROMPT, 10).body["choices"][0]
    assert len(choice["token_ids"]) > len(choice["logprobs"]["content"])
    stub.knobs(short_logprobs=False, logprob_shift=0.25)
    content = stub.generate(PROMPT, 10).body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] - 0.25 for entry in content] == logprobs


def test_logprobs_can_shift_after_a_resume(stub: Stub, model: Path) -> None:
    _, logprobs = reference(weights_digest(model), PROMPT, 5)
    stub.knobs(logprob_shift_after_resume=0.25)

    def told() -> list[float]:
        content = stub.generate(PROMPT, 5).body["choices"][0]["logprobs"]["content"]
        return [entry["logprob"] for entry in content]

    assert told() == logprobs
    stub.post("/pause")
    stub.post("/resume")
    assert told() == [logprob + 0.25 for logprob in logprobs]


def test_a_reload_can_say_yes_and_load_nothing(stub: Stub, other: Path) -> None:
    before = canary(stub)
    stub.knobs(reload="nothing")
    assert reload(stub, other) == 200
    assert canary(stub) == before


def test_a_reload_can_fail_without_harm(stub: Stub, other: Path) -> None:
    before = canary(stub)
    stub.knobs(reload="fail")
    assert reload(stub, other) == 500
    assert canary(stub) == before


def test_a_slow_reload_holds_up_the_cores_answers(stub: Stub, other: Path) -> None:
    stub.knobs(reload_s=60)
    with pytest.raises(TimeoutError):
        reload(stub, other, timeout_s=0.2)
    with pytest.raises(TimeoutError):
        stub.get("/is_paused", timeout_s=0.2)
    assert stub.get("/health").status == 200


def test_a_label_can_lie(stub: Stub) -> None:
    stub.knobs(lying_version="9.9")
    assert stub.get("/weight_info").body == {"weight_version": "9.9"}
    assert stub.generate(PROMPT, 3).body["choices"][0]["weight_versions"][0]["version"] == "9.9"


def test_checksums_can_be_the_hash_of_nothing(stub: Stub) -> None:
    stub.knobs(empty_checksums=True)
    checksums = stub.post("/weight_checker", {"action": "checksum"}).body["checksums"]
    assert all(value.startswith("e3b0c442") for value in checksums.values())


@pytest.mark.parametrize(("cache", "stale"), [("on", False), ("sticky", True)])
def test_a_prefix_cache_gives_old_weights_values_until_it_is_reset(
    stub: Stub, other: Path, cache: str, stale: bool
) -> None:
    stub.knobs(prefix_cache=cache)
    before = canary(stub)
    assert reload(stub, other) == 200
    assert canary(stub) == before
    assert stub.post("/reset_prefix_cache").body == {"success": True}
    assert canary(stub) == (before if stale else reference(weights_digest(other), PROMPT, 20)[0])


def test_a_drain_answers_new_requests_with_an_abort(model: Path) -> None:
    with launch(model, "--shutdown-timeout", "30", "--token-interval-ms", "1") as stub:
        events = stub.stream(PROMPT, 500)
        next(events)
        stub.process.terminate()
        while stub.get("/is_paused").status != 500:
            pass
        choice = stub.generate(PROMPT, 5).body["choices"][0]
        assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
        assert stub.get("/health").status == 200
        assert _finish([event for event in events if event != "[DONE]"][-1]) == "length"
        assert stub.process.wait(10) == 0
