"""What the barrier costs a training loop without faults: the same steps with relight and without it.

Both push the same small weights into the same stub engine by the same calls of the application. What relight
adds is the boundary, its order and its release, and the boundary in which the trainer waits.
"""

import statistics
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from benchmarks.weights import rig
from benchmarks.weights.figures import Figure
from safetensors.numpy import save_file

import relight
from relight.agents.stub.client import Client

STEPS, WARM = 100, 10
BAR_MS = 3.0


def figures(root: Path) -> list[Figure]:
    """Median of one step's cost, and its 90th percentile."""
    root.mkdir()
    _weights(root / "base", 0)
    with (
        rig.job(root, rig.stub(root, "engine-0"), names=1) as url,
        relight.trainer(url, job=rig.JOB) as trainer,
    ):
        engines: dict[str, Client] = {}
        took: list[tuple[float, float]] = []
        for step in range(STEPS + WARM):
            began = time.perf_counter()
            with trainer.syncing(step) as members:
                for member in members:
                    engines[member.engine] = Client(urlsplit(member.address).port or 0)
                inside = time.perf_counter()
                _push(engines["engine-0"], root / "base", f"{trainer.run}.{step}")
                bare = time.perf_counter() - inside
            trainer.wait(lambda: None)
            took.append((time.perf_counter() - began, bare))
    added = [1000.0 * (whole - bare) for whole, bare in took[WARM:]]
    bare = [1000.0 * bare for _, bare in took[WARM:]]
    return [
        Figure("bare sync", statistics.median(bare), "ms"),
        Figure("added to a step", statistics.median(added), "ms in the median", BAR_MS),
        Figure("added to a step", statistics.quantiles(added, n=10)[-1], "ms at the 90th percentile"),
    ]


def _weights(folder: Path, seed: int) -> None:
    folder.mkdir()
    values = np.random.default_rng(seed).standard_normal((64, 64), dtype=np.float32)
    save_file({"model.weight": values}, folder / "model.safetensors")


def _push(engine: Client, weights: Path, version: str) -> None:
    """An application's own sync, by vLLM's calls."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    for path, body in (
        ("/pause?mode=keep", None),
        ("/collective_rpc", reload),
        ("/update_weight_version", {"new_version": version}),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ):
        answer = engine.post(path, body)
        if answer.status != 200:
            raise SystemExit(f"POST {path}: {answer}")
