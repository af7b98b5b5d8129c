"""The demo's own instruments: what they read, they read right."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from relight.agents.snapshot import MANIFEST
from relight.agents.trainer.snapshot import SnapshotSync
from relight.events.ids import EngineName
from relight.events.version import Version
from relight.orchestrator.cli.demo import disk, guard, learner, logs, model, processes, report, timeline
from relight.orchestrator.cli.demo.checks.case import Case
from relight.orchestrator.cli.demo.evidence import Note
from tests.demo_evidence import load

VLLM_LOG = """\
1700000000123 (APIServer pid=7) INFO 11-29 14:36:48 [request_logger.py:66] Received request \
generate-tokens-ab12-1: params: SamplingParams(n=1, temperature=0.0, max_tokens=56, min_tokens=0)
1700000000150 (APIServer pid=7) INFO:     127.0.0.1:51234 - "POST /inference/v1/generate HTTP/1.1" 200 OK
1700000000160 (APIServer pid=7) INFO:     127.0.0.1:51234 - "GET /is_paused HTTP/1.1" 200 OK
no time in front of it
"""
STUB_LOG = """\
1700000000123 INFO:     127.0.0.1 - "POST /inference/v1/generate?relight=canary HTTP/1.1" 200 \
request_id=generate-tokens-ab12-1 time=1700000000122 prompt=17 max_tokens=56
1700000000160 INFO:     127.0.0.1 - "GET /is_paused HTTP/1.1" 200 request_id=- time=1700000000160
"""


@pytest.mark.parametrize("text", [VLLM_LOG, STUB_LOG], ids=["vllm", "stub"])
def test_logs_tell_requests_and_the_budgets_that_were_asked_for(text: str) -> None:
    told = logs.parse(text.splitlines(), EngineName("engine-0"), 2)
    generation, probe = told.requests
    assert generation.method == "POST"
    assert generation.path.startswith("/inference/v1/generate")
    assert (probe.path, probe.status, probe.time_ms) == ("/is_paused", 200, 1700000000160)
    assert told.notes == (
        Note(
            engine=EngineName("engine-0"), incarnation=2, request_id="generate-tokens-ab12-1", max_tokens=56
        ),
    )


def _snapshot(directory: Path) -> Path:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, dtype=np.float32)}
    return Path(SnapshotSync(arrays, directory).write(Version(3, 1)).uri)


def test_an_intact_snapshot_is_read_with_its_digest_and_tensors(tmp_path: Path) -> None:
    weights = SnapshotSync({"a": np.ones((2, 3), dtype=np.float32)}, tmp_path).write(Version(3, 1))
    seen = disk.read(weights.uri)
    assert seen.wrong_files == ()
    assert seen.digest == weights.digest
    assert (seen.tensors["a"].dtype, seen.tensors["a"].shape) == ("F32", (2, 3))


def test_one_altered_byte_a_missing_file_and_a_strange_one_are_found(tmp_path: Path) -> None:
    uri = _snapshot(tmp_path)
    shard = uri / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert disk.read(str(uri)).wrong_files == ("model.safetensors has another sha256",)
    shard.write_bytes(content[:-1])
    assert "bytes" in disk.read(str(uri)).wrong_files[0]
    shard.rename(uri / "other.bin")
    assert set(disk.read(str(uri)).wrong_files) == {
        "model.safetensors is not there",
        "other.bin is not in the manifest",
    }
    assert (uri / MANIFEST).exists()


def test_a_base_model_is_the_same_each_time(tmp_path: Path) -> None:
    for kind in ("stub", "vllm"):
        for place in ("one", "other"):
            model.make(kind, tmp_path / kind / place)
        one, other = (
            (tmp_path / kind / place / "model.safetensors").read_bytes() for place in ("one", "other")
        )
        assert one == other


def test_the_numpy_learners_gradient_is_the_slope_of_its_loss(tmp_path: Path) -> None:
    model.make("stub", tmp_path / "base")
    learning = learner.load("stub", tmp_path / "base")
    inputs, targets = np.array([3, 5, 3]), np.array([7, 1, 2])
    arrays = learning.model
    for array in arrays:
        arrays[array] = arrays[array].astype(np.float64)
    _, gradients = learning._loss(inputs, targets)  # type: ignore[attr-defined]
    for name, place in (("model.embed.weight", (3, 2)), ("model.head.weight", (4, 7))):
        was = arrays[name][place]
        losses: list[float] = []
        for shift in (1e-6, -1e-6):
            arrays[name][place] = was + shift
            losses.append(learning._loss(inputs, targets)[0])  # type: ignore[attr-defined]
        arrays[name][place] = was
        assert gradients[name][place] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4)


def test_one_step_moves_each_parameter_by_about_the_learning_rate(tmp_path: Path) -> None:
    model.make("stub", tmp_path / "base")
    learning = learner.load("stub", tmp_path / "base")
    before = learning.tensors()
    step = learning.step()
    assert step.largest_change == pytest.approx(learner.RATE, rel=0.2)
    assert all(before[name] != after for name, after in learning.tensors().items())


def test_a_process_is_named_by_pid_and_start_and_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    named = processes.named(child.pid)
    assert named is not None
    assert processes.alive(named)
    assert named in processes.descendants(os.getpid())
    assert not processes.alive(named._replace(start=named.start + 1))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.named(child.pid) is None
    child.communicate()


def test_a_guard_without_farewell_stops_what_it_was_told_of_and_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    script = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(1, flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{script}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    named = processes.named(child.pid)
    assert named is not None
    guard.keep([msgspec.json.encode((named, "started")) + b"\n"], folder)
    child.communicate()
    assert child.returncode == 0
    assert not folder.exists()


def test_a_dismissed_guard_touches_nothing(tmp_path: Path) -> None:
    own = processes.named(os.getpid())
    assert own is not None
    keeping = guard.Guard(tmp_path)
    keeping.note(own)
    keeping.dismiss()
    assert tmp_path.exists()


def test_a_signal_to_the_group_does_not_reach_the_guard(tmp_path: Path) -> None:
    keeping = guard.Guard(tmp_path)
    assert os.getpgid(keeping.pid) != os.getpgid(0)
    os.kill(keeping.pid, signal.SIGCONT)
    keeping.dismiss()


def test_the_timeline_has_every_phase_and_says_what_it_means() -> None:
    phases = timeline.timeline(load("two-engines"))
    names = [phase.name for phase in phases]
    assert names[:8] == ["detect", "fence", "stop", "start", "boundary", "sync", "verify", "route"]
    assert {"total", "outage", "first_token"} < set(names)
    assert all(phase.ms is not None and phase.meaning for phase in phases)


def test_what_matters_of_a_recovery_is_told_in_words() -> None:
    case = Case(load("two-engines"))
    told = [report.told(message) for _, message in (*case.facts, *case.decisions)]
    said = "\n".join(line for line in told if line)
    for word in ("is dead (signal 9", "is fenced", "is proven gone", "is to be started", "is routed"):
        assert word in said
