"""The GRPO example in its short form: one run without and one with a fault, on real vLLM."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "grpo_tiny"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.vllm
@pytest.mark.timeout(420)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_training_learns_the_same_when_an_engine_is_killed_in_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compiled = tmp_path_factory.mktemp("inductor")  # torch's own cache, which stays
    picture = tmp_path / "grpo.png"
    short = ("--seeds", "1", "--steps", "24", "--kills", "1", "--picture", str(picture))
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE / "run.py"), *short],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(compiled)},
    )
    if ran.returncode:
        pytest.fail(f"{ran.stdout}\n{ran.stderr[-6000:]}")
    (line,) = ran.stdout.splitlines()
    assert "1 kill" in line and "0 lost, 0 stale" in line and line.endswith(": met")
    assert picture.read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["grpo.png"], "everything else was taken away"


def test_the_code_that_is_copied_stays_short() -> None:
    assert len((EXAMPLE / "train.py").read_text().splitlines()) <= 150


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's own module; scripts find their neighbours by bare names."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("verdict")
    for name in ("verdict", "faults"):
        sys.modules.pop(name, None)


def missed(verdict: Any, pairs: list[tuple[float, float]], **changes: float) -> str:
    """What falls short of runs with these rewards; `changes` are in every line of the first pair."""
    lines = [
        {"seed": seed, "faults": faults, "step": step, "reward": reward if step else 0.25, "drift": 1e-6}
        | {"asked": 8, "learned": 8, "stale": 0, "interrupted": 1, "kept": 1}
        | (changes if seed == 0 else {})
        for seed, pair in enumerate(pairs)
        for faults, reward in zip((False, True), pair, strict=True)
        for step in range(12)
    ]
    kill = verdict.Kill(seed=0, step=3, engine="engine-0", incarnation=1, what="core")
    return ", ".join(verdict.of(lines, [kill], wanted=1).missed)


ALIKE = [(0.95, 0.95), (0.96, 0.95), (0.94, 0.95)]


def test_equal_rewards_pass_and_noise_does_not_pass_for_sameness(verdict: Any) -> None:
    assert missed(verdict, ALIKE) == ""
    assert "may differ by" in missed(verdict, [(0.95, 0.80), (0.96, 0.81), (0.94, 0.80)])
    equal_in_the_mean = [(0.95, 0.75), (0.75, 0.95), (0.9, 0.9)]
    assert "may differ by" in missed(verdict, equal_in_the_mean)


def test_samples_that_are_lost_stale_or_of_other_weights_fall_short(verdict: Any) -> None:
    assert missed(verdict, ALIKE, learned=7) == "24 samples lost"
    assert missed(verdict, ALIKE, stale=1) == "24 samples stale"
    assert missed(verdict, ALIKE, drift=0.5) == "logprobs off by 0.5"
