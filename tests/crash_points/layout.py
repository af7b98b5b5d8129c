"""What a world is made of before it lives: names, files, commands, and the weights that are handed over."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from relight.events.ids import EngineName, JobName, NodeName
from tests.conftest import write_model

JOB, NODE = JobName("crash"), NodeName("node-a")
STRUCK, BYSTANDER = EngineName("struck"), EngineName("bystander")

Recovery = Literal["boundary", "snapshot"]

SETTINGS = """
[defaults]
recover_at = '{recover_at}'
lease_s = 1.0
backoff_s = 0.0
restarts = 100000
"""
NODE_FILE = """
job = "{job}"
node = "{node}"
host = "127.0.0.1"
state_dir = "{root}/state"
"""
ENGINE = """
[[engines]]
name = "{name}"
model = "{root}/model"
command = [
  "/bin/sh", "-c", 'echo "$RELIGHT_TAG $$ $TMPDIR $1" >> {root}/lives; shift; exec "$@"', "engine",
  "{{port}}", "{python}", "-m", "relight.agents.stub", "--model", "{weights}", "--host", "127.0.0.1",
  "--port", "{{port}}",
]
"""
"""Each life of an engine is written down by the engine itself, before anything else of it runs."""


def weights() -> dict[str, "np.ndarray[Any, Any]"]:
    """What the trainer hands over (see benchmarks/waiting_trainer.py)."""
    rng = np.random.default_rng(1)
    return {"model.weight": rng.standard_normal((64, 64), dtype=np.float32)}


def checksums() -> dict[str, str]:
    """What an engine must answer that holds them."""
    return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in weights().items()}


def write(root: Path, recover_at: Recovery, orchestrator: Sequence[str] | None) -> dict[str, list[str]]:
    """Write all files; the commands by name, less the bus's URL."""
    for folder in ("tmp", "deaths", "model", "weights"):
        (root / folder).mkdir()
    write_model(root / "model")
    save_file(
        {name: np.zeros_like(each) for name, each in weights().items()}, root / "model/model.safetensors"
    )
    (root / "lives").touch()
    (root / "orchestrator.toml").write_text(SETTINGS.format(recover_at=recover_at))
    started_on = "{weights}" if recover_at == "snapshot" else str(root / "model")
    tables = [
        ENGINE.format(name=name, root=root, python=sys.executable, weights=started_on)
        for name in (STRUCK, BYSTANDER)
    ]
    (root / "node.toml").write_text(NODE_FILE.format(job=JOB, node=NODE, root=root) + "".join(tables))
    victim = [sys.executable, "-m", "tests.crash_points.victim", str(root)]
    return {
        "orchestrator": [
            *(orchestrator or [*victim, "orchestrator"]),
            *("orchestrate", "--job", JOB, "--config", str(root / "orchestrator.toml")),
        ],
        "agent": [*victim, "agent", "agent", "--config", str(root / "node.toml"), "--stop-engines"],
    }
