"""Everything that can happen to the world next.

A fault costs one of the faults that are left; what merely happens is free. Where the real bus gives an order
(each stream, each source), the model keeps it; everything else may happen in any order.
"""

from collections.abc import Iterator

from relight.events.facts import (
    DrainRequested,
    HoldRequested,
    OfEngine,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
)
from relight.events.ids import EngineName
from relight.events.schema import EngineState
from relight.events.values import Phase
from relight.events.version import Version
from tests.search import invariants
from tests.search import trainer as trainers
from tests.search.agent import Agent
from tests.search.deciding import Deciding
from tests.search.tending import Tending
from tests.search.training import Training
from tests.search.world import BORN, Next, Plan, Words, World

_E0 = EngineName("e0")
WISHES = (
    DrainRequested(engine=_E0),
    RetireRequested(engine=_E0),
    ReleaseRequested(engine=_E0),
    RestartRequested(engine=_E0),
    RestartRequested(),
    HoldRequested(),
)


class Model(Deciding, Tending, Training):
    """What can happen, and how it is judged."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._wishes = [self.messages.of(wish) for wish in WISHES]
        self._release = self.messages.of(ReleaseRequested())

    def start(self) -> World:
        """Nothing was ever started; the agents' first words are on their way."""
        agents: list[int] = []
        facts: list[int] = []
        for node in self.nodes:
            agent, said = node.restart(Agent(up=False), self.mind[self.mind.empty])
            agents.append(self.agents.number(agent))
            facts += map(self.messages.of, said)
        gone = trainers.fresh(6, self.mind[self.mind.empty], pushes=self.plan.pushes)[0]._replace(alive=False)
        return World(
            job=self.mind.empty,
            deciding=False,
            held=None,
            facts=tuple(facts),
            decisions=((), (), ()),
            agents=(agents[0], agents[1]),
            trainer=self.trainers.number(gone, trainers.key(gone)),
            doubled=0,
            late=None,
            replica=None,
            stamp=0,
            top=4,
            faults=self.plan.faults,
        )

    # --- everything that can happen next ------

    def free(self, world: World) -> Iterator[Next]:
        """What happens without a fault, less the passing of time and the end of rollouts."""
        if not world.deciding:
            yield ("takes over",), self._takes_over(world)
        elif world.held is not None and world.held[0] == "lost":
            yield ("commits again",), world._replace(held=None)
        elif world.facts:
            yield ("reads", world.facts[0]), self._reads(world)
        if world.held is not None and world.held[0] == "old" and world.deciding:
            yield ("commits late",), self._commits_late(world)
        for index in (0, 1):
            yield from self._of_agent(world, index)
        yield from self._of_trainer(world)
        if world.late is not None:
            yield (
                ("appends at last", world.late[0]),
                world._replace(late=None, facts=world.facts + world.late[1]),
            )
        if world.doubled:
            yield (
                ("is read again", world.doubled),
                world._replace(doubled=0, facts=(*world.facts, world.doubled)),
            )
        if world.replica is not None:
            yield ("is rolled back",), self._rolled_back(world, *world.replica)

    def rollout_ends(self, world: World) -> Next | None:
        trainer = self.trainers[world.trainer]
        if not (trainer.alive and trainers.may_close(trainer)):
            return None
        return ("trainer closes",), self.trainer_does(world, "close", trainers.close)

    def time(self, world: World) -> Iterator[Next]:
        """One deadline or another passes."""
        if world.deciding and (world.held is None or world.held[0] == "old"):
            for timer in self.mind.timers(world.job):
                yield ("waits for", *timer), self._commits(world, self.mind.fire(world.job, timer))

    def faults(self, world: World) -> Iterator[Next]:
        """What costs a fault."""
        if world.faults == 0:
            return
        world = world._replace(faults=world.faults - 1)
        kinds = self._kinds
        for index in (0, 1):
            yield from self._faults_of_agent(world, index)
        if "orchestrator" in kinds and world.deciding and world.held is None:
            yield from self._faults_of_mind(world)
        if "doubled" in kinds and world.facts and not world.doubled and self._may_double(world.facts[0]):
            yield ("! is doubled", world.facts[0]), world._replace(doubled=world.facts[0])
        if "late" in kinds and world.late is None:
            for source in (0, 1, 2):
                yield ("! cannot append", source), world._replace(late=(source, ()))
        if "operator" in kinds:
            yield from self._faults_of_operator(world)
        if "bus" in kinds and world.replica is None:
            yield ("! is copied",), world._replace(replica=(world.job, world.facts))
            yield ("! is emptied",), self._rolled_back(world, self.mind.reborn, ())
        yield from self._faults_of_trainer(world)

    def _faults_of_operator(self, world: World) -> Iterator[Next]:
        for wish in self._wishes:
            yield ("! an operator says", wish), world._replace(facts=(*world.facts, wish))

    def hold_ends(self, world: World) -> Next | None:
        """Whoever held the job releases it."""
        if not self.mind[world.job].meta.hold or self._release in world.facts:
            return None
        said = ("an operator says", self._release)
        return said, world._replace(facts=(*world.facts, self._release))

    def _may_double(self, fact: int) -> bool:
        return isinstance(self.messages[fact], OfEngine)

    def _rolled_back(self, world: World, job: int, facts: Words) -> World:
        return world._replace(
            job=job,
            facts=facts,
            decisions=((BORN,), (BORN,), (BORN,)),
            deciding=False,
            held=None,
            replica=None,
            doubled=0,
            stamp=world.stamp + 1,
        )

    # --- judgement ------

    def judge(self, world: World) -> str | None:
        """Which rule does not hold in this state."""
        if self.plan.parts:
            head, further = (self.agents[number] for number in world.agents)
            if rule := invariants.of_parts(self.nodes[0].engine, head, further):
                return rule
        for index in (0, 1):
            key = (world.job, world.agents[index], world.stamp)
            if key not in self._judged:
                self._judged[key] = self._judge(index, *key)
            broken = self._judged[key]
            if broken:
                return broken
        return None

    def _judge(self, index: int, job: int, agent: int, stamp: int) -> str | None:
        name, state = self.nodes[index].engine, self.mind[job]
        if state.meta.bus != str(stamp) or name not in state.engines:
            return None
        if self.nodes[index].part:
            return None
        return invariants.of_engine(state, state.engines[name], name, self.agents[agent])

    def settled(self, world: World) -> str:
        """`served`, `named` (what is not served is named by an alarm, or was taken out), or nothing."""
        job, barrier = self.mind[world.job], self.trainers[world.trainer].barrier
        opening = barrier.opening if barrier.open else None
        if opening is not None and opening.sync == "all" and barrier.released is None:
            return ""
        if job.meta.bus != str(world.stamp) or len(job.engines) < (1 if self.plan.parts else 2):
            return ""
        exported = opening is not None and opening.exports == job.meta.version
        ends = [_end_of(engine, job.meta.version, exported) for engine in job.engines.values()]
        named = "named" in ends
        if "" in ends or (not named and ("waits" in ends or job.meta.rolling)):
            return ""
        return "named" if named else "served"


def _end_of(engine: EngineState, version: Version | None, exported: bool) -> str:
    """What an alarm names is no end for an engine whose weights the trainer offers at that moment."""
    route, phase = engine.route, engine.phase
    if phase is Phase.SERVING and engine.then != "restart":
        return "waits"  # to be taken out, for another one that is on its way back
    if phase is Phase.SERVING:
        served = route is not None and route.version == version and engine.intent is None
        return "served" if served else ""
    waits_in_vain = phase is Phase.STALE and exported
    named = phase in (Phase.RETIRED, Phase.STOPPED) or (engine.alarmed and not waits_in_vain)
    return "named" if named else ""
