"""The demo from its first process to its last. Nothing here helps the recovery: it starts, strikes, looks.

Whatever happens, everything that was started has ended when `play` is left.
"""

import signal
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import aiohttp
import anyio
import anyio.to_thread
import msgspec

from relight.events.bus.client import open_bus
from relight.events.facts import WeightsPublished
from relight.events.values import Process
from relight.events.version import Version
from relight.orchestrator.cli.demo import disk, layout, logs, model, processes, scenes
from relight.orchestrator.cli.demo.bulletin import Bulletin, whole
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.evidence import Evidence, Left, Plan, Trainer
from relight.orchestrator.cli.demo.guard import Guard
from relight.orchestrator.cli.demo.inventory import Inventory
from relight.orchestrator.cli.demo.layout import Place
from relight.orchestrator.cli.demo.report import Progress
from relight.orchestrator.cli.demo.services import Services
from relight.orchestrator.cli.demo.stage import Stage
from relight.orchestrator.cli.demo.trainee import Reports

BUS_S = 60.0
"""Longest wait for the bus; an empty one is up in 0.1 s."""


async def play(plan: Plan, place: Place, progress: Progress) -> Evidence:
    """Play the demo in `place` and return what was seen; raises DemoFailed, often in a group."""
    guard = Guard(place.root)
    inventory = Inventory()
    processes.adopt_orphans()
    async with anyio.create_task_group() as tasks:
        services = Services(tasks, directory=place.root, env=layout.environment(place), guard=guard)
        tasks.start_soon(_reap, services)
        try:
            return await _played(plan, place, progress, services, inventory)
        finally:
            with anyio.CancelScope(shield=True):
                await services.stop()
                inventory.clear()
                guard.dismiss()
            tasks.cancel_scope.cancel()
    raise AssertionError("left by return or by an error")


async def _reap(services: Services) -> None:
    """Take the exits of orphans that this process has adopted, as an init would."""
    with anyio.open_signal_receiver(signal.SIGCHLD) as signals:
        async for _ in signals:
            services.reap()


async def _played(
    plan: Plan, place: Place, progress: Progress, services: Services, inventory: Inventory
) -> Evidence:
    job = layout.new_job()
    layout.write(place, plan, job=job)
    await anyio.to_thread.run_sync(model.make, plan.kind, place.base)
    bus_command = (*layout.RELIGHT, "bus", "--port", "0", "--dir", str(place.bus))
    server = await services.start("bus", bus_command, pipes=True)
    url = await server.line(within_s=BUS_S)
    progress.say(f"the bus is at {url}, the job is {job}, everything lies in {place.root}")
    inventory.note_service(server.process)
    inventory.note_port(url)
    async with open_bus(url) as bus, aiohttp.ClientSession() as http:
        reports = Reports()
        stage = Stage(
            plan=plan,
            place=place,
            say=progress.say,
            services=services,
            inventory=inventory,
            url=url,
            job=bus.job(job),
            http=http,
            bulletin=Bulletin(bus.job(job), show=progress.show),
            reports=reports,
        )
        return await _seen(stage)


async def _seen(stage: Stage) -> Evidence:
    """Play the scenes; then stop everything, the bus last, and look at what is left."""
    old_alive, trainer = await through(stage, scenes.bring_up)
    stage.say("stopping the agent with its engines, then the orchestrator, then the bus")
    for name in ("agent", "orchestrator"):
        await stage.services[name].stop()
    evidence = await gathered(stage, old_alive, trainer, states=(stage.place.state,))
    return msgspec.structs.replace(evidence, left=stage.inventory.left(stage.place.scratch))


async def through(
    stage: Stage, bring_up: Callable[[Stage], Awaitable[None]]
) -> tuple[tuple[Process, ...], Trainer]:
    """All scenes; which processes of the dead incarnation lived after the recovery, and the trainer's end."""
    async with anyio.create_task_group() as watching:
        watching.start_soon(stage.bulletin.run)
        watching.start_soon(stage.reports.run)
        await bring_up(stage)
        await scenes.train(stage)
        await scenes.interrupt(stage)
        stage.after = await scenes.look(stage)
        dead = stage.injections[-1]
        old_alive = processes.living(stage.started(dead.engine, dead.incarnation).processes)
        trainer = await scenes.finish(stage)
        watching.cancel_scope.cancel()
        return old_alive, trainer
    raise AssertionError("left by return or by an error")


async def gathered(
    stage: Stage, old_alive: tuple[Process, ...], trainer: Trainer, *, states: Iterable[Path]
) -> Evidence:
    """What was seen, once all but the bus has ended, which is stopped. `left` is for whoever looks then.

    `states`: the state directories of the agents.
    """
    facts, decisions = await whole(stage.job)
    parked = await stage.job.parked()
    snapshot = await anyio.to_thread.run_sync(disk.read, _published(stage, Version(trainer.run, 1)))
    told = [logs.read(state) for state in states]
    await stage.services["bus"].stop()
    return Evidence(
        plan=stage.plan,
        facts=facts,
        decisions=decisions,
        parked=parked,
        injections=tuple(stage.injections),
        before=stage.before,
        after=stage.after,
        old_alive=old_alive,
        pieces=tuple(piece for piece in stage.reports.pieces if piece.at_ms >= stage.sent_ms),
        turns=tuple(stage.reports.turns[-2:]),
        requests=tuple(each for log in told for each in log.requests),
        notes=tuple(each for log in told for each in log.notes),
        witnesses=stage.witnesses,
        snapshot=snapshot,
        trainer=trainer,
        exits=stage.services.exits,
        looked=stage.inventory.looked,
        left=Left(),
    )


def _published(stage: Stage, version: Version) -> str:
    told = [fact for _, fact in stage.bulletin.all(WeightsPublished) if fact.version == version]
    if not told:
        raise DemoFailed(f"no weights of {version} were published")
    return told[-1].uri
