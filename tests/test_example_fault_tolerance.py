"""The example on a Ray cluster: real raylets, a core killed in two calls, and every check of the audit."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "fault_tolerance"
PNG = b"\x89PNG\r\n\x1a\n"


NO_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.timeout(420)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize(
    ("kind", "engines"), [("stub", 2), pytest.param("vllm", 1, marks=[pytest.mark.vllm, NO_VLLM])]
)
def test_an_engine_of_a_ray_job_is_recovered_in_its_bundle(tmp_path: Path, kind: str, engines: int) -> None:
    picture = tmp_path / "recovery.png"
    how = ("--engine", kind, "--engines", str(engines), "--picture", str(picture))
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE / "run.py"), *how],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "RELIGHT_BUS_URL"},
    )
    if ran.returncode:
        pytest.fail(f"{ran.stdout[-6000:]}\n{ran.stderr[-6000:]}")
    assert ran.stdout.splitlines()[-1].endswith(": met")
    assert picture.read_bytes().startswith(PNG)
