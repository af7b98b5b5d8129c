"""`make example-grpo`: the same runs without and with faults, a picture, and one line of figures.

Exits 1 where a sample was lost or stale, a run did not learn, or the rewards are not the same within noise.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import anyio
import job
import plot
import verdict
from faults import Injector, Kill

from relight.events.bus.client import open_bus
from relight.events.bus.job import JobBus
from relight.events.errors import leaves
from relight.events.ids import JobName
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.guard import Guard
from relight.orchestrator.cli.demo.services import Services
from relight.orchestrator.cli.running import interrupted_by_sigterm

STEP_S = 300.0
"""For one step: both engines may have to be started again in it."""


class Play:
    """Both trainings, on one job."""

    def __init__(self, root: Path, args: argparse.Namespace) -> None:
        self._root = root
        self._args = args
        self._began = time.monotonic()
        self.lines: list[verdict.Line] = []
        self.kills: list[Kill] = []

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    async def play(self) -> None:
        """Start everything, train without faults, then with them, stop everything. Raises DemoFailed."""
        guard = Guard(self._root)
        async with anyio.create_task_group() as tasks:
            services = Services(tasks, directory=self._root, env=job.environment(self._root), guard=guard)
            try:
                self._say(f"starting a bus, an orchestrator, and an agent with {job.ENGINES} vLLM engines")
                url = await job.start(services, self._root)
                async with open_bus(url) as bus:
                    on_bus = bus.job(JobName(job.JOB))
                    await job.serving(on_bus)
                    self._say("every engine serves")
                    await self._train(services, url)
                    await self._train(services, url, struck=on_bus)
            finally:
                with anyio.CancelScope(shield=True):
                    await services.stop()
                    guard.dismiss()
            tasks.cancel_scope.cancel()

    async def _train(self, services: Services, url: str, *, struck: JobBus | None = None) -> None:
        """Every run, one after the other; its engines are killed where `struck` is given."""
        seeds, steps = list(range(self._args.seeds)), self._args.steps
        name = "trainer-with-faults" if struck else "trainer-without-faults"
        runs = ("--steps", str(steps), "--seeds", *map(str, seeds))
        trainer = await job.train(services, self._root, url, name=name, runs=runs)
        async with anyio.create_task_group() as striking:
            for seed in seeds:
                injector = (
                    Injector(struck, seed=seed, steps=steps, kills=self._args.kills) if struck else None
                )
                for _ in range(steps):
                    line = json.loads(await trainer.line(within_s=STEP_S))
                    self.lines.append({**line, "faults": struck is not None})
                    if injector:
                        striking.start_soon(injector.step_is_over, line["step"], line["seconds"], self._note)
                self._say(f"{name}: seed {seed}, reward {line['reward']:.3f} after {steps} steps")
        await trainer.wait(within_s=STEP_S)

    def _note(self, kill: Kill) -> None:
        self.kills.append(kill)
        self._say(f"killed the {kill.what} of {kill.engine}.{kill.incarnation} in step {kill.step}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run (30)")
    parser.add_argument("--kills", type=int, default=2, help="engines to kill in a run with faults (2)")
    parser.add_argument("--picture", type=Path, default=Path("grpo.png"), help="where the PNG goes")
    args = parser.parse_args()
    interrupted_by_sigterm()
    root = Path(tempfile.mkdtemp(prefix="relight-grpo-"))
    play = Play(root, args)
    try:
        anyio.run(play.play)
    except KeyboardInterrupt:
        shutil.rmtree(root)
        return 130
    except (DemoFailed, ExceptionGroup) as failed:
        errors = leaves(failed)
        if not all(isinstance(error, DemoFailed) for error in errors):
            raise
        print(f"logs are kept in {root}", file=sys.stderr)
        print(f"example-grpo: {'; '.join(map(str, errors))}")
        return 1
    told = verdict.of(play.lines, play.kills, wanted=args.seeds * args.kills)
    plot.draw(told, args.picture)
    print(told.told())
    shutil.rmtree(root)
    return 1 if told.missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
