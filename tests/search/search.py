"""Breadth first over everything that can happen; then a fault-free tail from each state."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from relight.events.values import Phase
from tests.search import trainer as trainers
from tests.search.lines import line
from tests.search.model import Model
from tests.search.trainer import PROGRAM
from tests.search.world import Broken, Happening, Next, Plan, World

TAIL = 2000
"""Steps within which a tail settles."""
BEYOND = 4
"""Boundaries that the trainer opens after its program for whoever still waits."""


class Found(NamedTuple):
    """What a search came to."""

    plan: str
    states: int
    transitions: int
    depth: int
    """Of the last level that was begun."""
    complete: bool
    """Every history within the plan's faults was seen."""
    seconds: float
    tails: int
    served: int
    """Tails that end with every engine serving; the others end with alarms that name what is not."""
    longest_tail: int
    broken: str | None
    trace: tuple[str, ...] = ()


class Search:
    """One plan's search."""

    def __init__(self, plan: Plan) -> None:
        self.model = Model(plan)
        self._seen: dict[World, int] = {}
        self._came: list[tuple[int, Happening]] = []
        self._worlds: list[World] = []
        self._tails: dict[World, str] = {}
        self.longest_tail = 0
        self._first = self._begin()

    def _begin(self) -> World:
        world = self.model.start()
        if not self.model.plan.warm:
            return world
        served = list(self._calm(world._replace(faults=0)))[-1][1]
        return served._replace(faults=self.model.plan.faults)

    def _calm(self, world: World) -> Iterator[Next]:
        """Until both engines serve and the trainer waits for rollouts."""
        while True:
            step = next(self.model.free(world), None)
            if step is None:
                return
            yield step
            world = step[1]

    def run(self, *, states: int, seconds: float, tail_every: int = 1) -> Found:
        """Search until everything was seen, or so many states or seconds; a tail from each nth state."""
        began = time.monotonic()
        self._add(self._first, -1, ("begins",))
        depth, transitions, first, served, tails = 0, 0, 0, 0, 0
        complete = True
        broken: str | None = None
        trace: tuple[str, ...] = ()
        try:
            while first < len(self._worlds) and complete:
                level, depth = range(first, len(self._worlds)), depth + 1
                first = len(self._worlds)
                for number in level:
                    if len(self._worlds) >= states or (
                        number % 64 == 0 and time.monotonic() - began > seconds
                    ):
                        complete = False
                        break
                    transitions += self._expand(number)
                    if number % tail_every == 0:
                        tails += 1
                        served += self._tail(number) == "served"
        except _Violation as violation:
            broken, trace = violation.rule, violation.trace
        spent = time.monotonic() - began
        return Found(
            self.model.plan.name,
            len(self._worlds),
            transitions,
            depth,
            complete,
            spent,
            tails,
            served,
            self.longest_tail,
            broken,
            trace,
        )

    # --- breadth first -----------------------------------------------------------------------------

    def _add(self, world: World, parent: int, happening: Happening) -> None:
        if world not in self._seen:
            self._seen[world] = len(self._worlds)
            self._worlds.append(world)
            self._came.append((parent, happening))
            if rule := self.model.judge(world):
                raise _Violation(rule, self._trace(len(self._worlds) - 1))

    def _expand(self, number: int) -> int:
        count = 0
        try:
            for happening, after in self._next(self._worlds[number]):
                count += 1
                self._add(after, number, happening)
        except Broken as broken:
            raise _Violation(broken.rule, self._trace(number)) from broken
        return count

    def _next(self, world: World) -> Iterator[Next]:
        model, still = self.model, True
        for step in model.free(world):
            if "silent" not in step[0][0]:
                still = False
            yield step
        if step_ := model.rollout_ends(world):
            yield step_
        if released := model.hold_ends(world):
            yield released
        if still:
            yield from model.time(world)
        if world.faults:
            yield from model.faults(world)
            if "time" in model.plan.kinds and not still:
                for (_, *timer), after in model.time(world._replace(faults=world.faults - 1)):
                    yield ("! waits for", *timer), after

    def _trace(self, number: int) -> tuple[str, ...]:
        lines: list[str] = []
        while number > 0:
            parent, happening = self._came[number]
            lines.append(line(self.model, self._worlds[parent], happening))
            number = parent
        return tuple(reversed(lines))

    # --- tails -------------------------------------------------------------------------------------

    def _tail(self, number: int) -> str:
        """How the world settles if nothing fails any more."""
        world = self._worlds[number]._replace(faults=0)
        path: list[World] = []
        steps: list[tuple[World, Happening]] = []
        try:
            while (end := self._tails.get(world)) is None:
                if len(path) >= TAIL:
                    raise _Stuck(f"nothing has settled within {TAIL} steps")
                path.append(world)
                step = self._calmly(world)
                if step is None:
                    end = self.model.settled(world)
                    if not end:
                        raise _Stuck("nothing more happens, and the job has not settled")
                    break
                steps.append((world, step[0]))
                world = step[1]
                if rule := self.model.judge(world):
                    raise _Stuck(rule)
        except (_Stuck, Broken) as stuck:
            tail = tuple(line(self.model, before, happening) for before, happening in steps)
            raise _Violation(
                f"liveness: {stuck}", (*self._trace(number), "·  no fault from here on", *tail)
            ) from None
        self.longest_tail = max(self.longest_tail, len(path))
        self._tails.update(dict.fromkeys(path, end))
        return end

    def _calmly(self, world: World) -> Next | None:
        """The next thing that happens where everything works and nobody is slow; none at the end."""
        model = self.model
        step = next(model.free(world), None)
        if step is not None:
            return step
        trainer = model.trainers[world.trainer]
        over = trainer.opened >= len(PROGRAM)
        serving = any(engine.phase is Phase.SERVING for engine in model.mind[world.job].engines.values())
        waits = trainer.barrier.opening is not None and trainer.barrier.opening.sync == "stale"
        if (serving or not waits) and (ended := model.rollout_ends(world)):
            return ended
        if released := model.hold_ends(world):
            return released
        if over and model.settled(world) == "served":
            return None
        return self._waits(world) or (serving and self._goes_on(world)) or self._is_named(world)

    def _waits(self, world: World) -> Next | None:
        """Every deadline passes, each once."""
        after, passed = world, False
        for kind in ("asked", "rest", "intent", "sync"):
            for happening, _ in list(self.model.time(after)):
                if happening[1] != kind or passed:
                    continue
                fired = next((w for h, w in self.model.time(after) if h == happening), None)
                if fired is not None and fired != after:
                    return happening, fired
        return None

    def _goes_on(self, world: World) -> Next | None:
        """A trainer whose rollouts came back goes on to its next sync."""
        model = self.model
        trainer = model.trainers[world.trainer]
        barrier = trainer.barrier
        if barrier.open and barrier.opening is not None and barrier.opening.sync == "all":
            return None
        if trainer.opened >= len(PROGRAM) + BEYOND:
            return None
        if barrier.open:
            return ("trainer closes",), model.trainer_does(world, "close", trainers.close)
        what = trainers.beyond(trainer)
        return ("trainer opens",), model.trainer_does(
            world, "beyond", lambda each: trainers.open_(each, what)
        )

    def _is_named(self, world: World) -> Next | None:
        return next(((h, after) for h, after in self.model.time(world) if h[1] == "wait"), None)


class _Stuck(Exception):
    """A tail does not end well."""


class _Violation(Exception):
    def __init__(self, rule: str, trace: tuple[str, ...]) -> None:
        super().__init__(rule)
        self.rule = rule
        self.trace = trace
