"""What becomes of a wish: the orchestrator's commits, followed until the engine is where it shall be."""

import getpass
from collections.abc import Callable

import anyio

from relight.events.bus.follow import Follower
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable, RelightError
from relight.events.facts import DrainRequested, RestartRequested
from relight.events.ids import EngineName, Source
from relight.events.schema import EngineState
from relight.events.values import Phase

ENDED = (Phase.STOPPED, Phase.RETIRED)


class NotYet(RelightError):
    """What was wished has not come about in time, or cannot; the message says where the engine stands."""


def operator() -> Source:
    """Who wishes."""
    try:
        return Source(f"operator/{getpass.getuser()}")
    except (OSError, KeyError):  # a container's user without a name
        return Source("operator/unknown")


async def wished(
    job: JobBus,
    wish: DrainRequested | RestartRequested,
    *,
    until: Callable[[EngineState], bool],
    within_s: float,
) -> EngineState:
    """Say `wish` and return the engine's state once it is as it shall be. Raises NotYet, BusUnavailable."""
    assert wish.engine is not None
    follower = Follower(job)
    where, wished_for = "the bus told nothing of it", "it was not asked for"
    with anyio.move_on_after(within_s):
        await follower.next()  # what is decided from here on is heard
        wished_for = "whether the wish was heard is not known"
        await job.hint(wish, source=operator())
        wished_for = "the wish stands"
        while True:
            state = await _state(job, wish.engine)
            if state is not None:
                if until(state):
                    return state
                where = _where(state)
            await follower.next()
    raise NotYet(f"{wish.engine} is not where it shall be after {within_s:.3g} s: {where}; {wished_for}")


async def _state(job: JobBus, engine: EngineName) -> EngineState | None:
    """As it is committed; None while the bus is away, which the follower waits out."""
    try:
        return (await job.snapshot()).engines.get(engine)
    except BusUnavailable:
        return None


def _where(state: EngineState) -> str:
    """The engine's place in its life, and what is awaited there."""
    step = f", waiting for {type(state.intent).__name__}" if state.intent is not None else ""
    return f"incarnation {state.incarnation} is {state.phase}{step}"
