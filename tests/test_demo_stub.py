"""`relight demo --engine stub`, run as a user runs it: it recovers from each fault and leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relight.orchestrator.cli.demo import processes
from relight.orchestrator.cli.parser import FAULTS

DEMO = (sys.executable, "-m", "relight.orchestrator.cli", "demo", "--engine", "stub")
WITHIN_S = 90.0


@contextmanager
def _started(tmp_path: Path, *options: str) -> "Iterator[subprocess.Popen[str]]":
    """A demo whose folder lies under `tmp_path`; none outlives the test."""
    tmp_path.mkdir(exist_ok=True)
    demo = subprocess.Popen(
        [*DEMO, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        yield demo
    finally:
        demo.kill()
        demo.communicate()


def _played(tmp_path: Path, *options: str) -> dict[str, Any]:
    """The object that a demo printed, which must have ended with code 0 and have removed its folder."""
    with _started(tmp_path, "--json", *options) as demo:
        out, said = demo.communicate(timeout=WITHIN_S)
    assert demo.returncode == 0, said[-4000:]
    assert list(tmp_path.iterdir()) == []
    told: dict[str, Any] = json.loads(out)
    return told


def _until(demo: "subprocess.Popen[str]", words: str) -> None:
    """Read what the demo says until it says this."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if words in line:
            return
    raise AssertionError(f"the demo ended before it said {words!r}")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "kill-core"])
def test_one_engine_recovers_from_each_fault(fault: str, tmp_path: Path) -> None:
    told = _played(tmp_path, "--fault", fault)
    assert [finding for finding in told["audit"] if not finding["passed"]] == []
    assert len(told["audit"]) >= 30


def test_the_object_of_json_has_what_others_rely_on(tmp_path: Path) -> None:
    began = time.monotonic()
    told = _played(tmp_path, "--engines", "2")
    assert time.monotonic() - began < 20.0
    assert set(told) == {"audit", "phases", "requests", "events"}
    assert all(set(finding) == {"name", "passed", "detail"} for finding in told["audit"])
    assert any(finding["name"].startswith("survivors") for finding in told["audit"])
    names = (
        "detect",
        "fence",
        "stop",
        "start",
        "boundary",
        "sync",
        "verify",
        "route",
        "first_token",
        "total",
    )
    assert set(told["phases"]) >= {f"{name}_ms" for name in names}
    assert sorted(each["mode"] for each in told["requests"]) == ["continue", "restart"]
    for each in told["requests"]:
        assert len(each["token_ids"]) == 64
        assert each["finish_reason"] == "length"
        assert len(each["attempts"]) == 2
    types = {event["type"] for event in told["events"]}
    assert types >= {"EngineDead", "RouteFenced", "EngineStopped", "StartEngine", "SyncWeights", "RouteAdded"}
    assert all(isinstance(event["data"], dict) for event in told["events"])


def test_a_demo_that_nobody_reads_any_more_plays_on_and_leaves_nothing(tmp_path: Path) -> None:
    with _started(tmp_path) as demo:
        _until(demo, "the bus is at")
        assert demo.stdout is not None and demo.stderr is not None
        demo.stdout.close()
        said = demo.stderr.read()
        assert demo.wait(timeout=WITHIN_S) == 0, said
    assert list(tmp_path.iterdir()) == []


def test_two_demos_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    with _started(tmp_path / "one") as one, _started(tmp_path / "other") as other:
        for demo in (one, other):
            out, said = demo.communicate(timeout=WITHIN_S)
            assert demo.returncode == 0, out[-4000:] + said


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("starting the orchestrator", signal.SIGINT),
        ("sending two requests", signal.SIGINT),
        ("to the core", signal.SIGTERM),
    ],
)
def test_an_interrupted_demo_stops_everything(words: str, number: signal.Signals, tmp_path: Path) -> None:
    with _started(tmp_path) as demo:
        _until(demo, words)
        below = processes.descendants(demo.pid)
        assert below
        demo.send_signal(number)
        demo.communicate(timeout=WITHIN_S)
    assert demo.returncode == 130
    assert processes.living(below) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    with _started(tmp_path) as demo:
        _until(demo, "sending two requests")
        below = processes.descendants(demo.pid)
        demo.kill()
        demo.communicate(timeout=WITHIN_S)
    deadline = time.monotonic() + 20.0
    while processes.living(below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [processes.title(process.pid) for process in processes.living(below)] == []


def test_a_trainer_that_dies_fails_the_demo_with_its_last_words(tmp_path: Path) -> None:
    with _started(tmp_path) as demo:
        _until(demo, "sending two requests")
        trainer = next(
            process
            for process in processes.descendants(demo.pid)
            if "cli.demo.trainer" in processes.title(process.pid)
        )
        os.kill(trainer.pid, signal.SIGKILL)
        out, said = demo.communicate(timeout=WITHIN_S)
    assert demo.returncode == 1
    assert "trainer ended with code -9" in said
    kept = list(tmp_path.iterdir())
    assert len(kept) == 1
    assert f"kept in {kept[0]}" in out
    assert (kept[0] / "agent.log").exists()


def test_vllm_that_is_not_installed_is_named_with_the_way_out(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['vllm'] = None; from relight.orchestrator.cli.main import main"
    ran = subprocess.run(
        [sys.executable, "-c", f"{hide}; sys.exit(main())", "demo", "--engine", "vllm"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ran.returncode == 2
    assert "--engine stub" in ran.stderr
    assert list(tmp_path.iterdir()) == []
