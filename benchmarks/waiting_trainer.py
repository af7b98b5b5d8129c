"""A trainer that has synced once and waits for its rollouts until its standard input ends."""

import sys
from pathlib import Path

import numpy as np

import relight


def main(url: str, job: str, snapshots: str) -> None:
    """Sync version RUN.0 of a small random model, then hold a boundary open."""
    rng = np.random.default_rng(1)
    weights = {"model.weight": rng.standard_normal((64, 64), dtype=np.float32)}
    with relight.trainer(url, job=job, sync=relight.SnapshotSync(weights, Path(snapshots))) as trainer:
        trainer.sync(0)
        print("waiting", flush=True)
        trainer.wait(sys.stdin.read)


if __name__ == "__main__":
    main(*sys.argv[1:])
