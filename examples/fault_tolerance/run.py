"""The main job on a Ray cluster: engines in a placement group, a trainer, two interrupted calls, an audit.

The scenes and the audit are those of `relight demo`; here `relight ray up` runs the agents in the cluster,
one a bundle, and `relight ray down` must leave nothing. Exits 1 where a check failed.
"""

import argparse
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import anyio
import anyio.to_thread
import cluster
import msgspec
import picture

from relight.events.bus.client import open_bus
from relight.events.errors import leaves
from relight.events.ids import JobName
from relight.orchestrator.cli.demo import layout, model, report, scenes
from relight.orchestrator.cli.demo.audit import audit
from relight.orchestrator.cli.demo.bulletin import Bulletin
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.evidence import Evidence, Plan
from relight.orchestrator.cli.demo.guard import Guard
from relight.orchestrator.cli.demo.inventory import Inventory
from relight.orchestrator.cli.demo.layout import RELIGHT, Place
from relight.orchestrator.cli.demo.play import BUS_S, gathered, through
from relight.orchestrator.cli.demo.report import Progress
from relight.orchestrator.cli.demo.services import Services
from relight.orchestrator.cli.demo.stage import Stage
from relight.orchestrator.cli.demo.timeline import timeline
from relight.orchestrator.cli.demo.trainee import Reports
from relight.orchestrator.cli.running import interrupted_by_sigterm

RAY_S = 180.0
"""For `relight ray up` and `down`: agents import for some seconds, and stop their engines at the end."""


class Show(NamedTuple):
    """What is to be played, and where."""

    plan: Plan
    place: Place
    job: JobName
    progress: Progress
    inventory: Inventory


async def play(show: Show, address: str) -> Evidence:
    """Play it in a cluster that stands; whatever happens, all that was started has ended afterwards."""
    plan, place, job, progress, inventory = show
    guard = Guard(place.root)
    async with aiohttp.ClientSession() as http, anyio.create_task_group() as tasks:
        services = Services(tasks, directory=place.root, env=layout.environment(place), guard=guard)
        try:
            bus_command = (*RELIGHT, "bus", "--port", "0", "--dir", str(place.bus))
            bus = await services.start("bus", bus_command, pipes=True)
            url = await bus.line(within_s=BUS_S)
            inventory.note_service(bus.process)
            inventory.note_port(url)
            file = cluster.write_job(place, plan, job=job, address=address)
            async with open_bus(url) as reading:
                bulletin = Bulletin(reading.job(job), show=progress.show)
                stage = Stage(
                    plan=plan, place=place, say=progress.say, services=services, inventory=inventory, url=url,
                    job=reading.job(job), http=http, bulletin=bulletin, reports=Reports(),
                )  # fmt: skip
                try:
                    return await seen(stage, file)
                except BaseException:
                    with anyio.CancelScope(shield=True):
                        await ray(stage, "down", file)
                    raise
        finally:
            with anyio.CancelScope(shield=True):
                await services.stop()
                guard.dismiss()
            tasks.cancel_scope.cancel()
    raise AssertionError("left by return or by an error")


async def ray(stage: Stage, word: str, file: Path) -> None:
    """`relight ray up` or `down`, to its end; `down` of what is down changes nothing."""
    command = (*RELIGHT, "ray", word, "--config", str(file), "--bus", stage.url, "--within", str(RAY_S))
    service = await stage.services.start(f"ray {word}", command)
    if (code := await service.wait(within_s=2 * RAY_S)) != 0:
        raise DemoFailed(f"`relight ray {word}` ended with {code}; see {service.log}")


async def seen(stage: Stage, file: Path) -> Evidence:
    """All scenes, then everything down, the bus last. What is left is looked for once the cluster is gone."""
    old_alive, trainer = await through(stage, partial(bring_up, file=file))
    stage.say("ending the agents with their engines, the actors and the placement group")
    await ray(stage, "down", file)
    await stage.services["orchestrator"].stop()
    return await gathered(stage, old_alive, trainer, states=stage.place.state.glob("*/*"))


async def bring_up(stage: Stage, *, file: Path) -> None:
    """The orchestrator, the agents in the cluster, the trainer; until every engine is routed."""
    stage.say(
        f"starting the orchestrator, `relight ray up` with {len(stage.plan.engines)} bundles, the trainer"
    )
    await scenes.start(stage, "orchestrator")
    await ray(stage, "up", file)
    await scenes.start_trainer(stage)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "stub"), default=layout.default_kind())
    parser.add_argument("--engines", type=int, default=2, help="each in a bundle on a node of its own (2)")
    parser.add_argument("--fault", choices=("kill-core", "kill-server", "stall"), default="kill-core")
    parser.add_argument("--recover-at", choices=("boundary", "snapshot"), default="boundary")
    parser.add_argument("--picture", type=Path, default=Path("recovery.png"), help="where the PNG goes")
    args = parser.parse_args()
    job, progress, inventory = layout.new_job(), Progress(sys.stderr), Inventory()
    plan = layout.plan(args.engine, engines=args.engines, fault=args.fault, recover_at=args.recover_at)
    place = Place(Path(tempfile.mkdtemp(prefix="relight-r-")))
    try:
        progress.say(f"starting a Ray cluster: a head, and {args.engines} nodes of one CPU")
        layout.write(place, plan, job=job)
        model.make(plan.kind, place.base)
        with cluster.standing(place, nodes=args.engines) as address:
            # Only now: Ray has a way of its own with SIGTERM, which ends this process where it stands.
            interrupted_by_sigterm()
            evidence = anyio.run(play, Show(plan, place, job, progress, inventory), address)
    except KeyboardInterrupt:
        shutil.rmtree(place.root)
        return 130
    except (DemoFailed, ExceptionGroup) as failed:
        if not all(isinstance(error, DemoFailed) for error in leaves(failed)):
            raise
        print(f"fault-tolerance: {'; '.join(map(str, leaves(failed)))}; logs are kept in {place.root}")
        return 1
    left = inventory.left(place.scratch)
    return judged(msgspec.structs.replace(evidence, left=left), place, args.picture)


def judged(evidence: Evidence, place: Place, picture_at: Path) -> int:
    """Print the audit and the timeline, draw the picture, and print one line at the end."""
    findings, phases = audit(evidence), timeline(evidence)
    report.audit(findings, sys.stdout)
    report.timeline(phases, sys.stdout)
    picture.draw(evidence, phases, picture_at)
    failed = [finding.name for finding in findings if not finding.passed]
    told = f"{len(findings) - len(failed)} of {len(findings)} checks passed"
    if failed:
        (place.root / "evidence.json").write_bytes(msgspec.json.encode(evidence))
        print(f"fault-tolerance: {told}; failed: {', '.join(failed)}; evidence is kept in {place.root}")
        return 1
    shutil.rmtree(place.root)
    took_ms = {phase.name: phase.ms for phase in phases}["total"] or 0.0
    print(f"fault-tolerance: {told}; {evidence.plan.fault}, recovered in {took_ms:.0f} ms: met")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
