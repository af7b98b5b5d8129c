"""The fault-free tail: everything must settle, and stay so (L1, L5).

Each engine serves at the job's version, was taken out for a reason, or waits for something that an Alarm
names; turns that had begun have ended; the trainer goes on; recoveries have ended.
"""

from typing import TYPE_CHECKING

from relight.events.facts import ReleaseRequested
from relight.events.schema import EngineState
from relight.events.values import Phase
from tests.simulate.faults.injector import OPERATOR
from tests.simulate.once import Broken

if TYPE_CHECKING:
    from tests.simulate.faults.injector import Injector
    from tests.simulate.world import Job, World

TAIL_S = 900.0
"""Longest tail."""
LOOK_S = 5.0
STAYS = 5
"""Looks in a row that must find it settled."""


def settle(world: "World", injector: "Injector") -> None:
    """Run the tail; raises Broken where it does not settle."""
    injector.cease()
    begun = {job.name: job.trainer.iterations for job in world.jobs}
    waiting = dict(world.turns)
    end = world.kernel.now + TAIL_S
    settled = 0
    while settled < STAYS:
        if world.kernel.now >= end:
            raise Broken("L1", "; ".join(filter(None, (_unsettled(world, job, begun) for job in world.jobs))))
        world.kernel.run(world.kernel.now + LOOK_S)
        for job in world.jobs:  # whoever held it finds that the release was lost with the bus
            if job.judge.job is not None and job.judge.job.meta.hold and settled == 0:
                job.says(ReleaseRequested(), OPERATOR)
        left = [name for name, turn in waiting.items() if world.turns.get(name) is turn]
        calm = not left and not any(_unsettled(world, job, begun) for job in world.jobs)
        settled = settled + 1 if calm else 0
        world.settled = world.settled or settled > 0


def _unsettled(world: "World", job: "Job", begun: dict[str, int]) -> str | None:
    """What has not settled yet; none where all has."""
    state = job.judge.job
    if state is None or not job.judge.is_current():
        return f"{job.name}: nothing is committed on this bus"
    if len(state.engines) < len(job.engines):
        return f"{job.name}: engines are not known"
    for name, engine in state.engines.items():
        if (why := _engine(job, engine)) is not None:
            return f"{job.name}: {name}.{engine.incarnation} {why}"
    serving = any(engine.phase is Phase.SERVING for engine in state.engines.values())
    if serving and job.trainer.iterations <= begun[job.name] + 1:
        return f"{job.name}: the trainer does not go on"
    return None


def _engine(job: "Job", engine: EngineState) -> str | None:
    if engine.phase in (Phase.RETIRED, Phase.STOPPED):
        return None
    if engine.phase is Phase.SERVING:
        return None if engine.recovery is None else "serves, and its recovery has not ended"
    return None if engine.alarmed and engine.phase is not Phase.STALE else f"is {engine.phase}"
