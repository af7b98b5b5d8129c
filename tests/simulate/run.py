"""One seed from its beginning to its end, and many of them."""

import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

from relight.agents.replay import dispatch
from relight.agents.trainer import gate
from relight.orchestrator import term
from tests.simulate.faults import FAULTS
from tests.simulate.faults.injector import Injector
from tests.simulate.once import Broken
from tests.simulate.plan import Plan, swarm
from tests.simulate.rules import Watched
from tests.simulate.settle import settle
from tests.simulate.stage import staged
from tests.simulate.world import World


class Result(NamedTuple):
    """What a run came to."""

    seed: int
    broken: str | None
    """The rule that does not hold, and how."""
    digest: str
    """Of everything that happened: equal for equal seeds."""
    virtual_s: float
    cpu_s: float
    events: int
    turns: int
    """Turns of clients that were judged to their end."""
    faults: dict[str, int]
    lines: tuple[str, ...] = ()


def run(plan: Plan, *, traced: bool = False, settles: bool = True) -> Result:
    """Run one plan, its tail included where it `settles`; never raises for what is broken."""
    began = time.process_time()
    world = World(plan, traced=traced)
    broken: str | None = None
    with staged(world.flow, _others(world)):
        try:
            world.start()
            injector = Injector(world, FAULTS)
            injector.start()
            world.kernel.run(plan.faults_s)
            if settles:
                settle(world, injector)
        except Broken as rule:
            broken = str(rule)
        finally:
            world.end()
    return Result(
        seed=plan.seed,
        broken=broken,
        digest=world.digest(),
        virtual_s=world.kernel.now,
        cpu_s=time.process_time() - began,
        events=world.kernel.events,
        turns=sum(job.turns for job in world.jobs),
        faults=dict(world.faults),
        lines=tuple(world.lines or ()),
    )


def _others(world: World) -> dict[str, dict[str, object]]:
    """What else stands in place of something: threads, and the core's entrances, which are judged."""
    core = Watched(world.judge)
    return {
        gate.__name__: {"threading": world.flow.threading},
        dispatch.__name__: {"Follower": world.followed},
        term.__name__: {
            "step": core.step,
            "tick": core.tick,
            "take_over": core.take_over,
            "committed": core.committed,
        },
    }


def run_seed(seed: int) -> Result:
    return run(swarm(seed))


def quiet() -> None:
    """Leave Ctrl-C to the process that began this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def first_broken(seeds: Iterable[int]) -> Result | None:
    """The first of `seeds` whose run breaks a rule, for whoever has taken a safeguard away."""
    return next((result for result in map(run_seed, seeds) if result.broken), None)
