"""The demo with real vLLM: a killed EngineCore comes back with the weights of a real optimizer step."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(420),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PLAY = """
import sys
from relight.orchestrator.cli.demo.run import run
engines, recover_at = int(sys.argv[1]), sys.argv[2]
sys.exit(run(engine="vllm", engines=engines, fault="kill-core", as_json=True, recover_at=recover_at))
"""


def _played(tmp_path: Path, *, engines: int, recover_at: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-c", PLAY, str(engines), recover_at],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert list(tmp_path.iterdir()) == []
    told: dict[str, Any] = json.loads(ran.stdout)
    assert [finding for finding in told["audit"] if not finding["passed"]] == []
    return told


def _names(told: dict[str, Any]) -> set[str]:
    return {finding["name"] for finding in told["audit"]}


def test_the_only_engine_is_recovered_at_the_trainers_open_boundary(tmp_path: Path) -> None:
    told = _played(tmp_path, engines=1, recover_at="boundary")
    assert "only the replacement was synced" in _names(told)
    assert told["phases"]["sync_ms"] is not None


def test_the_only_engine_is_recovered_on_the_snapshot_and_the_trainer_is_never_asked(tmp_path: Path) -> None:
    told = _played(tmp_path, engines=1, recover_at="snapshot")
    assert "the trainer was not asked" in _names(told)


def test_the_survivor_of_two_engines_notices_nothing(tmp_path: Path) -> None:
    told = _played(tmp_path, engines=2, recover_at="boundary")
    assert "survivors were neither paused nor aborted" in _names(told)
    assert "survivors generated on without a break" in _names(told)
