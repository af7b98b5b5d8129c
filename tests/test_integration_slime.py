"""slime serves by SGLang, which no agent speaks: it is refused where it is written, and named."""

from pathlib import Path

import pytest

from relight.orchestrator.cli.main import main

NODE = """
job = "slime-1"
node = "node-a"
state_dir = "/var/lib/relight"

[[engines]]
name = "node-a-0"
kind = "sglang"
command = ["python", "-m", "sglang.launch_server", "--model-path", "/models/m", "--port", "{port}"]
"""


def test_an_engine_that_speaks_sglang_is_refused_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(NODE)
    assert main(["config", "check", str(file)]) == 2
    said = capsys.readouterr().err
    assert "sglang" in said and "engines[0].kind" in said
