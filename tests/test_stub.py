"""The stub engine as a process tree: how it serves, pauses, reloads and dies."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relight.agents.stub.launch import Stub, launch, make_model, pids_with, wait_gone
from relight.agents.stub.tokens import reference, score_prompt, weights_digest

PROMPT = [5, 6, 7]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", seed=1)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return make_model(tmp_path / "other", seed=2)


@pytest.fixture
def stub(model: Path, tmp_path: Path) -> Iterator[Stub]:
    (tmp_path / "tmp").mkdir()
    with launch(model, TMPDIR=str(tmp_path / "tmp")) as started:
        yield started


class Taken:
    """A stream read to its end: token ids, logprobs, the last chunk, errors, and whether [DONE] came."""

    def __init__(self, events: Iterator[Any]) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.choices: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.done = False
        for event in events:
            if event == "[DONE]":
                self.done = True
            elif "error" in event:
                self.errors.append(event["error"])
            else:
                (choice,) = event["choices"]
                self.choices.append(choice)
                self.ids += choice["token_ids"]
                self.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]

    @property
    def finish(self) -> str | None:
        return self.choices[-1]["finish_reason"] if self.choices else None


def segment_of(stub: Stub) -> Path:
    """The worker's segment of shared memory."""
    (path,) = [
        word for word in Path(f"/proc/{stub.worker}/maps").read_text().split() if "/dev/shm/psm_" in word
    ]
    return Path(path)


def first_token(events: Iterator[Any]) -> Any:
    """Wait for a stream's first event, so that the generation is surely running."""
    return next(events)


def reload(stub: Stub, folder: Path) -> int:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return stub.post("/collective_rpc", body).status


def test_it_starts_as_three_processes_and_answers_the_probes(stub: Stub) -> None:
    assert stub.get("/health")[:1] == (200,)
    assert stub.get("/is_paused").body == {"is_paused": False}
    assert stub.get("/is_sleeping").body == {"is_sleeping": False}
    assert stub.get("/load").body == {"server_load": 0}
    assert stub.get("/weight_info").body == {"weight_version": "default"}
    assert stub.get("/v1/models").body["data"][0]["max_model_len"] == 512
    assert stub.post("/collective_rpc", {"method": "check_health"}).body == {"results": [None]}
    assert os.getpgid(stub.core) == os.getpgid(stub.worker) == stub.process.pid


def test_a_folder_without_weights_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    with launch(tmp_path, wait=False) as stub:
        assert stub.process.wait(10) == 1
        stub.close()
        assert [line for line in stub.lines if "no *.safetensors" in line] == stub.lines


def test_a_used_port_ends_the_start_with_one_sentence(model: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        launch(model, "--port", str(taken.getsockname()[1]), wait=False) as stub,
    ):
        assert stub.process.wait(10) == 1
        stub.close()
        assert len(stub.lines) == 1
        assert "address already in use" in stub.lines[0]


def test_greedy_generations_equal_the_reference(stub: Stub, model: Path) -> None:
    want = reference(weights_digest(model), PROMPT, 40)
    taken = Taken(stub.stream(PROMPT, 40))
    assert (taken.ids, taken.logprobs) == want
    assert taken.done
    assert taken.finish == "length"
    assert all(choice["weight_versions"] is None for choice in taken.choices[:-1])
    assert taken.choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]
    whole = stub.generate(PROMPT, 40).body["choices"][0]
    assert (whole["token_ids"], [entry["logprob"] for entry in whole["logprobs"]["content"]]) == want


def test_a_continuation_at_every_cut_is_exact(stub: Stub) -> None:
    ids = Taken(stub.stream(PROMPT, 12)).ids
    for cut in range(12):
        assert stub.generate([*PROMPT, *ids[:cut]], 12 - cut).body["choices"][0]["token_ids"] == ids[cut:]


def test_prompt_logprobs_repeat_the_generation(stub: Stub, model: Path) -> None:
    ids, logprobs = reference(weights_digest(model), PROMPT, 8)
    scores = stub.generate([*PROMPT, *ids], 1, prompt_logprobs=0).body["prompt_logprobs"]
    assert scores[0] is None
    assert [entry[str(token)]["logprob"] for token, entry in zip(ids, scores[3:], strict=True)] == logprobs
    assert len(score_prompt(weights_digest(model), PROMPT)) == 3


def test_many_streams_at_once_each_get_their_own_tokens(stub: Stub, model: Path) -> None:
    digest = weights_digest(model)
    got: dict[int, list[int]] = {}
    readers = [
        threading.Thread(target=lambda n=n: got.update({n: Taken(stub.stream([n], 30)).ids}))
        for n in range(24)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert got == {n: reference(digest, [n], 30)[0] for n in range(24)}


def test_stream_interval_groups_tokens_after_the_first(model: Path) -> None:
    with launch(model, "--stream-interval", "16") as stub:
        taken = Taken(stub.stream(PROMPT, 40))
        sizes = [len(choice["token_ids"]) for choice in taken.choices]
        assert sizes[0] < 16 <= min(sizes[1:-1])
        assert taken.ids == reference(weights_digest(model), PROMPT, 40)[0]


def test_stop_tokens_stop_but_not_below_the_minimum(stub: Stub, model: Path) -> None:
    ids, _ = reference(weights_digest(model), PROMPT, 10)
    choice = stub.generate(PROMPT, 10, stop_token_ids=[ids[4]]).body["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (ids[:5], "stop", ids[4])
    choice = stub.generate(PROMPT, 10, stop_token_ids=[ids[4]], min_tokens=10).body["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (10, "length")


def test_several_samples_differ_and_a_seed_repeats_them(stub: Stub) -> None:
    def sampled() -> list[list[int]]:
        answer = stub.generate(PROMPT, 10, n=3, temperature=1.0, seed=4).body
        return [choice["token_ids"] for choice in answer["choices"]]

    first = sampled()
    assert len({tuple(ids) for ids in first}) == 3
    assert sampled() == first


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "params"),
    [([1], 0, {}), ([1] * 500, 13, {}), ([1] * 512, 1, {}), ([], 1, {}), ([-1], 1, {}), ([1], 1, {"n": 2})],
)
def test_bad_requests_are_refused_with_vllms_error_body(
    stub: Stub, token_ids: list[int], max_tokens: int, params: dict[str, Any]
) -> None:
    answer = stub.generate(token_ids, max_tokens, **params)
    assert answer.status == 400
    assert answer.body["error"]["code"] == 400
    assert stub.post("/inference/v1/generate", {"token_ids": "x"}).status == 400


def test_a_token_id_outside_the_vocabulary_kills_the_core_as_in_vllm(stub: Stub) -> None:
    assert stub.generate([512], 1).status == 500
    assert stub.process.wait(10) == 0


def test_a_budget_over_the_model_length_can_be_clamped_in_silence(model: Path) -> None:
    with launch(model, "--over-length", "clamp", "--max-model-len", "20") as stub:
        choice = stub.generate(PROMPT, 100).body["choices"][0]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (17, "length")


def test_the_access_line_stands_before_the_answer_is_done(stub: Stub) -> None:
    events = stub.stream(PROMPT, 500)
    request_id = first_token(events)["request_id"]
    stub.post("/abort_requests", {"request_ids": [request_id]})
    assert Taken(events).finish == "abort"
    request = r'"POST /inference/v1/generate HTTP/1\.1" 200'
    pattern = rf"{request} request_id={request_id} time=\d+ prompt=3 max_tokens=500$"
    assert [line for line in stub.lines if re.search(pattern, line)]


def test_a_client_that_leaves_frees_its_sequence(stub: Stub) -> None:
    stub.post("/pause?mode=keep")
    with pytest.raises(TimeoutError):
        stub.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}, timeout_s=0.2)
    stub.post("/resume")
    assert stub.post("/pause?mode=wait").status == 200
    metrics = stub.get("/metrics").body.decode()
    for name in ("num_requests_running", "num_requests_waiting"):
        assert re.search(rf"vllm:{name}\{{.*\}} 0\.0", metrics)
    (generated,) = re.findall(r"vllm:generation_tokens_total\{.*\} (.*)", metrics)
    assert float(generated) < 511


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_a_killed_core_or_worker_ends_streams_with_error_and_done(stub: Stub, victim: str) -> None:
    events = stub.stream(PROMPT, 500)
    first_token(events)
    os.kill(getattr(stub, victim), signal.SIGKILL)
    taken = Taken(events)
    assert taken.errors[0]["message"].startswith("EngineCore encountered an issue.")
    assert taken.errors[0]["code"] == 500
    assert taken.done
    assert stub.get("/health").status == 503
    assert stub.generate(PROMPT, 1).status == 500
    assert stub.process.wait(10) == 0


def test_a_killed_server_leaves_core_and_worker_as_orphans(stub: Stub, tmp_path: Path) -> None:
    core, worker = stub.core, stub.worker
    events = stub.stream(PROMPT, 500)
    first_token(events)
    stub.process.kill()
    stub.process.wait(10)
    with pytest.raises((OSError, ValueError)):
        list(events)
        raise ValueError("a chunked stream that is cut ends without its last chunk")
    assert (stub.core, stub.worker) == (core, worker)
    assert os.getpgid(core) == os.getpgid(worker) == stub.process.pid
    assert list((tmp_path / "tmp").glob("*.sock"))
    os.kill(core, signal.SIGKILL)
    wait_gone(core)
    wait_gone(worker)


def test_sigterm_tells_the_streams_and_ends_the_whole_tree_clean(stub: Stub, tmp_path: Path) -> None:
    core, worker = stub.core, stub.worker
    segment = segment_of(stub)
    assert list((tmp_path / "tmp").glob("*.sock"))
    events = stub.stream(PROMPT, 500)
    first_token(events)
    stub.process.terminate()
    taken = Taken(events)
    assert (len(taken.errors), taken.done) == (1, True)
    assert stub.process.wait(10) == 0
    wait_gone(core)
    wait_gone(worker)
    assert not segment.exists()
    assert not list((tmp_path / "tmp").glob("*.sock"))


def test_killpg_leaves_socket_and_segment_behind(stub: Stub, tmp_path: Path) -> None:
    segment = segment_of(stub)
    os.killpg(stub.process.pid, signal.SIGKILL)
    stub.process.wait(10)
    assert list((tmp_path / "tmp").glob("*.sock"))
    segment.unlink()


def test_a_stopped_core_looks_healthy_but_answers_nothing(stub: Stub) -> None:
    events = stub.stream(PROMPT, 500)
    first_token(events)
    core = stub.core
    os.kill(core, signal.SIGSTOP)
    for path in ("/health", "/v1/models", "/load", "/metrics"):
        assert stub.get(path).status == 200
    for path in ("/is_paused", "/weight_info"):
        with pytest.raises(TimeoutError):
            stub.get(path, timeout_s=0.2)
    frozen = stub.get("/metrics").body
    with pytest.raises(TimeoutError):
        stub.post("/collective_rpc", {"method": "check_health"}, timeout_s=0.2)
    assert stub.get("/metrics").body == frozen
    os.kill(core, signal.SIGCONT)
    assert Taken(events).finish == "length"


def test_tags_of_the_environment_are_not_seen_on_core_and_worker(model: Path) -> None:
    with launch(model, RELIGHT_TAG="x") as stub:
        assert b"RELIGHT_TAG" in Path(f"/proc/{stub.process.pid}/environ").read_bytes()
        for pid in (stub.core, stub.worker):
            assert b"RELIGHT_TAG" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_pause_abort_finishes_and_queues_what_comes_after(stub: Stub, model: Path) -> None:
    events = stub.stream(PROMPT, 500)
    first_token(events)
    assert stub.post("/pause").body == {"status": "paused"}
    assert Taken(events).finish == "abort"
    assert stub.get("/is_paused").body == {"is_paused": True}
    got: list[int] = []
    queued = threading.Thread(target=lambda: got.extend(Taken(stub.stream(PROMPT, 5)).ids))
    queued.start()
    assert stub.post("/resume").body == {"status": "resumed"}
    queued.join(10)
    assert got == reference(weights_digest(model), PROMPT, 5)[0]


def test_a_queued_request_is_aborted_with_no_token(stub: Stub) -> None:
    stub.post("/pause")
    body = {"token_ids": PROMPT, "request_id": "me", "sampling_params": {"max_tokens": 5}}
    answers: list[Any] = []
    queued = threading.Thread(target=lambda: answers.append(stub.post("/inference/v1/generate", body)))
    queued.start()
    while not any("generate-tokens-me" in line for line in stub.lines):
        os.sched_yield()
    assert stub.post("/abort_requests", {"request_ids": ["me", "generate-tokens-me"]}).body["aborted"] == 2
    queued.join(10)
    (choice,) = answers[0].body["choices"]
    assert (choice["finish_reason"], choice["token_ids"], choice["weight_versions"]) == ("abort", [], [])
    assert answers[0].headers["X-Request-Id"] == "me"


def test_pause_wait_lets_running_requests_finish(stub: Stub) -> None:
    events = stub.stream(PROMPT, 100)
    first_token(events)
    assert stub.post("/pause?mode=wait").status == 200
    assert Taken(events).finish == "length"


def test_pause_keep_and_reload_go_on_with_new_weights_and_two_spans(
    stub: Stub, model: Path, other: Path
) -> None:
    events = stub.stream(PROMPT, 300)
    kept = first_token(events)["choices"][0]["token_ids"]
    assert stub.post("/pause?mode=keep").status == 200
    assert stub.post("/reset_prefix_cache").body == {"success": False}
    assert stub.post("/reset_prefix_cache?reset_running_requests=true").body == {"success": True}
    assert reload(stub, other) == 200
    stub.post("/update_weight_version", {"new_version": "1.7"})
    stub.post("/resume")
    taken = Taken(events)
    ids = kept + taken.ids
    first, second = taken.choices[-1]["weight_versions"]
    cut = first["end"]
    assert (first["version"], second["version"], second["start"], second["end"]) == (
        "default",
        "1.7",
        cut,
        300,
    )
    assert ids[:cut] == reference(weights_digest(model), PROMPT, cut)[0]
    assert ids[cut:] == reference(weights_digest(other), [*PROMPT, *ids[:cut]], 300 - cut)[0]


def test_an_unknown_pause_mode_is_a_400(stub: Stub) -> None:
    assert stub.post("/pause?mode=maybe").status == 400


def test_a_reload_answers_with_the_new_weights(stub: Stub, other: Path) -> None:
    before = stub.post("/weight_checker", {"action": "checksum"}).body["checksums"]
    assert reload(stub, other) == 200
    assert (
        stub.generate(PROMPT, 20).body["choices"][0]["token_ids"]
        == reference(weights_digest(other), PROMPT, 20)[0]
    )
    after = stub.post("/weight_checker", {"action": "checksum"}).body["checksums"]
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)


def test_a_broken_reload_is_a_500_and_the_next_request_kills_the_core(stub: Stub, other: Path) -> None:
    (file,) = other.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    core = stub.core
    assert reload(stub, other) == 500
    assert stub.get("/health").status == 200
    assert stub.generate(PROMPT, 5).status == 500
    wait_gone(core)
    assert stub.process.wait(10) == 0


def test_a_reload_that_lacks_tensors_keeps_the_old_ones_in_silence(stub: Stub, tmp_path: Path) -> None:
    part = make_model(tmp_path / "part", seed=2, shards=2)
    (part / "model-00002-of-00002.safetensors").unlink()
    before = stub.post("/weight_checker", {"action": "checksum"}).body["checksums"]
    assert reload(stub, part) == 200
    after = stub.post("/weight_checker", {"action": "checksum"}).body["checksums"]
    assert [name[-8:] for name in after if after[name] == before[name]] == ["1.weight", "3.weight"]


def test_dummy_weights_cannot_reload_until_the_config_says_auto(model: Path) -> None:
    with launch(model, "--load-format", "dummy") as stub:
        assert (
            stub.generate(PROMPT, 5).body["choices"][0]["token_ids"]
            != reference(weights_digest(model), PROMPT, 5)[0]
        )
        assert reload(stub, model) == 500
        overrides = {"load_config": {"load_format": "auto"}}
        stub.post("/collective_rpc", {"method": "update_config", "kwargs": {"overrides": overrides}})
        assert reload(stub, model) == 200
        assert (
            stub.generate(PROMPT, 5).body["choices"][0]["token_ids"]
            == reference(weights_digest(model), PROMPT, 5)[0]
        )


def test_nothing_is_left_of_a_launched_stub(model: Path) -> None:
    with launch(model) as stub:
        prefix = stub.prefix
        assert len(pids_with(f"{prefix}::")) == 2
    assert pids_with(f"{prefix}::") == []
