"""One case in a world: arm it, strike the engine, wait until everything is at rest again, judge."""

from typing import NamedTuple

import anyio

from relight.events.errors import BusUnavailable
from relight.events.schema import Snapshot
from tests.crash_points import evidence, rules
from tests.crash_points.layout import STRUCK
from tests.crash_points.points import Case, Pass, name_of
from tests.crash_points.world import POLL_S, SETTLE_S, World

AGREE_S = 3.0
"""A commit's caller sees it done within milliseconds."""
LINGER_S = 0.6
"""At rest for so long with a death still due: its point is not passed in this recovery."""


class Visit(NamedTuple):
    """What came of one case."""

    case: Case
    passes: list[Pass]
    broken: list[str]
    seen: evidence.Seen | None = None

    @property
    def reached(self) -> bool:
        """Whether everybody died where they should."""
        return sum(each.dies for each in self.passes) == len(self.case)

    @property
    def name(self) -> str:
        return name_of(self.case)


async def visit(world: World, case: Case) -> Visit:
    """Visit `case`; the world is at rest before, and afterwards unless a rule is broken."""
    before = evidence.mark(world, await world.state())
    number = world.arm(case)
    world.strike(world.newest(STRUCK))
    late = ""
    try:
        with anyio.fail_after(SETTLE_S):
            await _settled(world, number, case, before.snapshot.engines[STRUCK].incarnation)
    except TimeoutError:
        late = f"it serves again: not within {SETTLE_S:g} s, {await world.state()}"
    after = await _agreed(world, before.snapshot)
    world.disarm()
    seen = await evidence.look(world, case, before, after)
    return Visit(case, seen.passes, [late] if late else rules.broken(seen), seen)


async def _settled(world: World, number: int, case: Case, lost: int) -> None:
    while True:
        dead = world.files.claimed(number)
        if await _recovered(world, lost):
            if dead == len(case):
                return
            with anyio.move_on_after(LINGER_S):
                while world.files.claimed(number) == dead:
                    await anyio.sleep(POLL_S)
            if world.files.claimed(number) == dead and await _recovered(world, lost):
                return
        await anyio.sleep(POLL_S)


async def _recovered(world: World, lost: int) -> bool:
    try:
        snapshot = await world.state()
        return snapshot.engines[STRUCK].incarnation > lost and await world.at_rest()
    except BusUnavailable:  # a machine that is busy answers late; the case has its own deadline
        return False


async def _agreed(world: World, before: Snapshot) -> Snapshot:
    """The state, once its commits are those that their callers have seen done; if they never are, as it is.

    A word that is said twice may be committed at any time: the state and the trace are of one moment then.
    """
    with anyio.move_on_after(AGREE_S):
        while True:
            after = await world.state()
            if after.commit - before.commit == world.commits_told():
                return after
            await anyio.sleep(POLL_S)
    return await world.state()
