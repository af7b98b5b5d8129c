"""The demo's trainer, a process of its own that uses relight as any user would: its public names only.

It syncs its weights, takes one optimizer step outside every boundary, syncs again, and then waits for
rollouts, as a training loop does. Both requests of the demo are its rollout. What it does it reports on
a descriptor; what it prints is for people.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

import relight
from relight.orchestrator.cli.demo import learner, rollout
from relight.orchestrator.cli.demo.reports import BEGIN, FINISH, GO, Rolled, Rolling, Stepped, Synced, tell


def main(argv: Sequence[str] | None = None) -> None:
    """Train one step, roll out, end."""
    parser = argparse.ArgumentParser(prog="python -m relight.orchestrator.cli.demo.trainer")
    parser.add_argument("--bus", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--snapshots", type=Path, required=True)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--report", type=int, required=True)
    train(parser.parse_args(argv))


def train(args: argparse.Namespace) -> None:
    requests = rollout.read(args.requests)
    learning = learner.load(args.kind, args.base)
    sync = relight.SnapshotSync(learning.model, args.snapshots, config=args.base)
    if sys.stdin.readline() != f"{BEGIN}\n":
        raise SystemExit("the demo is gone before it began")
    steps = 0
    with os.fdopen(args.report, "wb") as pipe, relight.trainer(args.bus, job=args.job, sync=sync) as trainer:
        trainer.sync(steps)
        tell(pipe, Synced(run=trainer.run, step=steps))
        base = learning.tensors()
        done = learning.step()
        steps += 1
        print(f"step {steps}: loss {done.loss:.4f}, largest parameter change {done.largest_change:.3g}")
        tell(
            pipe,
            Stepped(
                loss=done.loss, largest_change=done.largest_change, base=base, tensors=learning.tensors()
            ),
        )
        trainer.sync(steps)
        tell(pipe, Synced(run=trainer.run, step=steps))

        async def roll() -> int:
            rounds = 0
            async with rollout.callers(args.bus, job=args.job) as clients:
                tell(pipe, Rolling(steps=steps))
                while (word := await anyio.to_thread.run_sync(sys.stdin.readline)) == f"{GO}\n":
                    await rollout.both(clients, requests, pipe)
                    rounds += 1
            if word != f"{FINISH}\n":
                raise SystemExit(f"the demo is gone: it said {word!r}")
            return rounds

        rounds = trainer.wait(roll)
        print(f"rolled out {2 * rounds} requests")
        tell(pipe, Rolled(steps=steps, tensors=learning.tensors()))


if __name__ == "__main__":
    main()
