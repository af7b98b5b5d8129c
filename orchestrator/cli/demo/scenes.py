"""The demo's scenes, in order: relight comes up, the trainer syncs, two requests are struck, the end."""

import time

import anyio

from relight.events.decisions import Decision, RecoveryFinished, RouteAdded
from relight.events.envelope import Entry
from relight.events.facts import Fact, Healthy, StartFailed
from relight.events.ids import EngineName
from relight.events.version import Version
from relight.orchestrator.cli.demo import engine, faults, layout
from relight.orchestrator.cli.demo.checks.case import later
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.evidence import Injection, Look, Piece, Trainer
from relight.orchestrator.cli.demo.reports import (
    BEGIN,
    FINISH,
    GO,
    Returned,
    Rolled,
    Rolling,
    Stepped,
    Synced,
)
from relight.orchestrator.cli.demo.round import Striker, Witnessing, met_both
from relight.orchestrator.cli.demo.stage import CANARY_S, END_S, START_S, TRAIN_S, Stage

ROUNDS = 5
"""How often both requests are sent before the demo gives up: the fault met only one of them each time."""


async def bring_up(stage: Stage) -> None:
    """Start orchestrator, agent and trainer, and wait until every engine is routed on its base model."""
    plan = stage.plan
    stage.say(
        f"starting the orchestrator, the agent of {len(plan.engines)} {plan.kind} engine(s), the trainer"
    )
    for name in ("orchestrator", "agent"):
        await start(stage, name)
    await start_trainer(stage)


async def start(stage: Stage, name: str) -> None:
    """Start a command of relight's that is started again where it is killed."""
    commands = layout.commands(stage.place, url=stage.url, job=stage.job.name)
    service = await stage.services.start(name, commands[name], again=True)
    stage.inventory.note_service(service.process)


async def start_trainer(stage: Stage) -> None:
    """Start the trainer, and wait until every engine is routed on its base model."""
    plan, reports = stage.plan, stage.reports
    command = layout.trainer(
        stage.place, url=stage.url, job=stage.job.name, kind=plan.kind, report=reports.writing
    )
    trainer = await stage.services.start("trainer", command, fds=[reports.writing], pipes=True)
    reports.started()
    stage.inventory.note_service(trainer.process)
    for name in plan.engines:
        await _routed(stage, name)


async def _routed(stage: Stage, name: EngineName) -> None:
    """Wait for an engine's first route; a start that fails twice has nothing to do with chance."""

    def right(_: Entry, told: Fact | Decision) -> bool:
        match told:
            case RouteAdded():
                return told.engine == name
            case StartFailed():
                return told.engine == name and told.incarnation > 1
            case _:
                return False

    within_s = START_S[stage.plan.kind]
    kinds: tuple[type[Fact | Decision], ...] = (RouteAdded, StartFailed)
    _, told = await stage.bulletin.until(kinds, right, within_s=within_s, what=f"the first route of {name}")
    if isinstance(told, StartFailed):
        raise DemoFailed(f"{name} cannot be started: {told.detail or told.cause}")


async def train(stage: Stage) -> None:
    """Let the trainer begin: full sync, one optimizer step, full sync; then it waits for rollouts."""
    stage.say("the trainer begins: a full sync, one AdamW step, a full sync")
    reports = stage.reports
    await stage.services["trainer"].say(BEGIN)
    stepped = await reports.until(Stepped, within_s=TRAIN_S, what="the optimizer step")
    stage.say(f"one optimizer step: loss {stepped.loss:.4f}, largest change {stepped.largest_change:.3g}")
    synced = await reports.until(Synced, count=2, within_s=TRAIN_S, what="the sync after the step")
    version = Version(synced.run, synced.step)

    def proven(_: Entry, fact: Healthy) -> bool:
        return fact.version == version and fact.canary is not None

    await stage.bulletin.until(Healthy, proven, within_s=CANARY_S, what=f"the canary at {version}")
    await reports.until(Rolling, within_s=TRAIN_S, what="the rollout's beginning")
    stage.say(f"every engine is at {version}; the trainer waits for its rollouts, its boundary is open")


async def look(stage: Stage) -> tuple[Look, ...]:
    """Ask every engine directly, and note what its processes hold."""
    looks: dict[EngineName, Look] = {}

    async def at(name: EngineName) -> None:
        started = stage.started(name)
        looks[name] = await engine.look(stage.http, started, stage.plan)
        stage.inventory.note(started.processes, address=started.address)

    async with anyio.create_task_group() as looking:
        for name in stage.plan.engines:
            looking.start_soon(at, name)
    return tuple(looks[name] for name in stage.plan.engines)


async def interrupt(stage: Stage) -> None:
    """Send both requests and strike, until a fault has met both; each time everything is recovered first."""
    for number in range(1, ROUNDS + 1):
        stage.say("taking uninterrupted greedy references from every engine")
        stage.before = await look(stage)
        stage.say(f"sending two requests of {stage.plan.max_tokens} tokens: one restart, one continue")
        stage.sent_ms = time.monotonic() * 1000.0
        striker = Striker(lambda piece: _strike(stage, piece), lambda: len(stage.reports.turns))
        stage.reports.on_piece = striker
        async with anyio.create_task_group() as watching:
            witnesses: list[Witnessing] = []
            watching.start_soon(_witness, stage, striker, witnesses)
            await stage.services["trainer"].say(GO)
            await _returned(stage, striker, count=2 * number)
            stage.witnesses = tuple(each.witness for each in witnesses)
            watching.cancel_scope.cancel()
        if striker.injection is not None and met_both(stage.reports.turns[-2:]):
            return
        when = "when the fault struck" if striker.injection else "by the eighth chunk"
        stage.say(f"one of them had finished {when}: both are sent again")
    raise DemoFailed(f"in {ROUNDS} rounds the fault never met both requests")


async def _returned(stage: Stage, striker: Striker, *, count: int) -> None:
    """Wait for both turns, and for the recovery where the fault was injected."""
    within_s = START_S[stage.plan.kind]
    await stage.reports.until(Returned, count=count, within_s=within_s, what="the end of both requests")
    stage.say("both requests are complete")
    if (injection := striker.injection) is None:
        return

    def recovered(entry: Entry, record: RecoveryFinished) -> bool:
        return record.engine == injection.engine and later(entry, injection.decisions)

    what = f"the recovery of {injection.engine}"
    await stage.bulletin.until(RecoveryFinished, recovered, within_s=within_s, what=what)


async def _witness(stage: Stage, striker: Striker, witnesses: list[Witnessing]) -> None:
    """From the fault on, ask every survivor for one generation after another."""
    injection = await striker.struck()
    witnesses += [Witnessing(each, stage.plan) for each in stage.before if each.engine != injection.engine]
    async with anyio.create_task_group() as asking:
        for witness in witnesses:
            asking.start_soon(witness.run, stage.http)


def _strike(stage: Stage, piece: Piece) -> Injection:
    started = stage.started(piece.engine, piece.incarnation)
    injection = faults.inject(stage.plan.fault, started, services=stage.services, bulletin=stage.bulletin)
    stage.injections.append(injection)
    for struck in injection.struck:
        stage.say(f"signal {struck.signal} to the {struck.what}, pid {struck.process.pid}")
    return injection


async def finish(stage: Stage) -> Trainer:
    """Let the rollout end, and wait for the trainer's own end."""
    stage.say("the rollout is over: the trainer ends")
    await stage.services["trainer"].say(FINISH)
    rolled = await stage.reports.until(Rolled, within_s=END_S, what="the rollout's end")
    code = await stage.services["trainer"].wait(within_s=END_S)
    stepped, synced = stage.reports.of(Stepped)[0], stage.reports.of(Synced)[-1]
    return Trainer(
        run=synced.run,
        loss=stepped.loss,
        largest_change=stepped.largest_change,
        steps_before=stage.reports.of(Rolling)[0].steps,
        steps_after=rolled.steps,
        base=stepped.base,
        tensors=stepped.tensors,
        tensors_after=rolled.tensors,
        exit_code=code,
    )
