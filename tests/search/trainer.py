"""The trainer: its real barrier, and a small program of boundaries.

A run syncs, waits for rollouts, steps, syncs again and waits in a boundary that stays open.
"""

from typing import Any, NamedTuple

from relight.agents.trainer.barrier import Barrier, Began, CaughtUp, Closed, Ended, Opened, replace
from relight.agents.trainer.sync import refusal
from relight.agents.trainer.turns import after
from relight.events import codec
from relight.events.decisions import SyncWeights
from relight.events.facts import Fact, WeightsPublished, WeightsSynced
from relight.events.schema import Snapshot
from relight.events.values import Failed, Loaded
from relight.events.version import Version
from relight.orchestrator.core.job import Job

PROGRAM = (("all", 0), ("stale", 0), ("all", 1), ("stale", 1))
"""Boundaries of a run: the scope of their syncs, and the step."""


class Trainer(NamedTuple):
    """One run, or what is left of it."""

    alive: bool
    barrier: Barrier
    opened: int = 0
    """Boundaries of the program that were opened."""


Said = tuple[Trainer, tuple[Fact, ...]]


def key(trainer: Trainer) -> tuple[Any, ...]:
    return (trainer.alive, trainer.opened, codec.to_json(_plain(trainer.barrier)))


def _plain(barrier: Barrier) -> Any:
    gone = sorted(f"{name}.{incarnation}" for name, incarnation in barrier.gone)
    return [replace(barrier, gone=frozenset(), answers={}), gone, dict(sorted(barrier.answers.items()))]


def fresh(run: int, job: Job, *, pushes: bool) -> Said:
    """A run begins: it reads the state before it says anything."""
    return _caught_up(Trainer(True, Barrier(run=run, pushes=pushes)), job, tell=False)


def caught_up(trainer: Trainer, job: Job) -> Said:
    """The bus is another one: what is open is said again."""
    return _caught_up(trainer, job, tell=True)


def _caught_up(trainer: Trainer, job: Job, *, tell: bool) -> Said:
    snapshot = Snapshot(epoch=job.epoch, meta=job.meta if job.epoch else None, engines=dict(job.engines))
    return turn(trainer, CaughtUp(snapshot, tell))


def turn(trainer: Trainer, event: Any) -> Said:
    step = after(trainer.barrier, event)
    barrier = replace(step.barrier, heard=0, patience=0, roster={})
    return trainer._replace(barrier=barrier), step.facts


def opening(trainer: Trainer) -> Opened | None:
    """The next boundary of the program."""
    if trainer.barrier.open or trainer.opened >= len(PROGRAM):
        return None
    return _opened(trainer, *PROGRAM[trainer.opened])


def beyond(trainer: Trainer) -> Opened:
    """What a program that goes on would open after its end."""
    last = PROGRAM[-1][1]
    step, stale = divmod(trainer.opened - len(PROGRAM), 2)
    return _opened(trainer, "stale" if stale else "all", last + 1 + step)


def _opened(trainer: Trainer, scope: Any, step: int) -> Opened:
    version = Version(trainer.barrier.run, step)
    return Opened(step, version, version, scope)


def open_(trainer: Trainer, what: Opened) -> Said:
    opened, said = turn(trainer, what)
    return opened._replace(opened=trainer.opened + 1), said


def may_close(trainer: Trainer) -> bool:
    barrier = trainer.barrier
    if not barrier.open or barrier.running is not None:
        return False
    assert barrier.opening is not None
    if barrier.opening.sync == "all":
        return barrier.released is not None
    return trainer.opened < len(PROGRAM)


def begin(trainer: Trainer) -> Said:
    return turn(trainer, Began())


def end(trainer: Trainer, dead: frozenset[tuple[str, int]]) -> Said:
    """The running export ends well; a push does not reach the `dead`, nor whoever has left."""
    order = trainer.barrier.running
    assert order is not None
    if not trainer.barrier.pushes:
        answer: Any = WeightsPublished(
            sync=order.sync, version=order.version, uri=f"/w/{order.version}", digest="sha256:d"
        )
        return turn(trainer, Ended(answer))
    lost = {*dead, *((str(name), number) for name, number in trainer.barrier.gone)}
    answer = WeightsSynced(
        sync=order.sync,
        version=order.version,
        loaded=tuple(Loaded(m.engine, m.incarnation) for m in order.members if m[:2] not in lost),
        failed=tuple(Failed(m.engine, m.incarnation, "left", True) for m in order.members if m[:2] in lost),
    )
    return turn(trainer, Ended(answer))


def export_fails(trainer: Trainer) -> Said:
    order = trainer.barrier.running
    assert isinstance(order, SyncWeights)
    return turn(trainer, Ended(refusal(order, "disk full", touched=bool(trainer.barrier.pushes))))


def close(trainer: Trainer) -> Said:
    return turn(trainer, Closed())
