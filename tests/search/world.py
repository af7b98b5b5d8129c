"""The whole world as one small tuple, and everything that can happen to it next.

A fault costs one of the faults that are left; what merely happens is free. Where the real bus gives an order
(each stream, each source), the model keeps it; everything else may happen in any order.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from relight.events.decisions import StartEngine, SyncWeights
from relight.events.facts import NodeSilent, OfEngine, TrainerSilent
from relight.events.ids import EngineName, NodeName
from relight.events.values import Phase
from relight.orchestrator.settings import Settings
from tests.search import invariants, trainer as trainers
from tests.search.mind import ENGINES, Mind, Outcome
from tests.search.node import Agent, Node
from tests.search.pool import Messages, Pool
from tests.search.trainer import Trainer

Words = tuple[int, ...]
BORN = -1
"""Among decisions: the bus is another one than before."""


class Plan(NamedTuple):
    """What is searched."""

    name: str
    faults: int
    """How many may happen in one history."""
    kinds: frozenset[str]
    settings: Settings = Settings(restarts=2)
    pushes: bool = False
    warm: bool = True
    """Begin where both engines serve; else where nothing was ever started."""


class World(NamedTuple):
    """Numbers of values in the pools of `Search`; 0 is none."""

    job: int
    deciding: bool
    held: tuple[str, int, Outcome] | None
    """A commit whose reply was lost (`lost`), or that a frozen orchestrator will yet try (`old`)."""
    facts: Words
    decisions: tuple[Words, Words, Words]
    agents: tuple[int, int]
    trainer: int
    doubled: int
    """A fact that will be read once more."""
    late: tuple[int, Words] | None
    """A source whose appends wait, and what waits."""
    replica: tuple[int, Words] | None
    """What a lagging replica holds: the bus will be rolled back to it."""
    stamp: int
    top: int
    """The highest epoch ever issued."""
    faults: int


Happening = tuple[Any, ...]
Next = tuple[Happening, World]


class Broken(Exception):
    """A rule does not hold in the state that a step leads to."""

    def __init__(self, rule: str, world: World) -> None:
        super().__init__(rule)
        self.rule = rule
        self.world = world


class Model:
    """What can happen. Every part's answer is computed once and then remembered."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.messages = Messages()
        self.mind = Mind(plan.settings, self.messages, pushes=plan.pushes)
        self.agents: Pool[Agent] = Pool()
        self.trainers: Pool[Trainer] = Pool()
        self.nodes = tuple(Node(NodeName(node), ENGINES[NodeName(node)]) for node in "ab")
        self._did: dict[Any, Any] = {}
        self._judged: dict[tuple[int, int, int], str | None] = {}
        self._kinds = plan.kinds

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

    # --- everything that can happen next -----------------------------------------------------------

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
            yield ("appends at last", world.late[0]), world._replace(late=None, facts=world.facts + world.late[1])
        if world.doubled:
            yield ("is read again", world.doubled), world._replace(doubled=0, facts=(*world.facts, world.doubled))
        if world.replica is not None:
            yield ("is rolled back",), self._rolled_back(world, *world.replica)

    def rollout_ends(self, world: World) -> Next | None:
        trainer = self.trainers[world.trainer]
        if not (trainer.alive and trainers.may_close(trainer)):
            return None
        return ("trainer closes",), self._trainer_does(world, "close", trainers.close)

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
        if "bus" in kinds and world.replica is None:
            yield ("! is copied",), world._replace(replica=(world.job, world.facts))
            yield ("! is emptied",), self._rolled_back(world, self.mind.empty, ())
        yield from self._faults_of_trainer(world)

    def _may_double(self, fact: int) -> bool:
        return isinstance(self.messages[fact], OfEngine)

    # --- the orchestrator --------------------------------------------------------------------------

    def _takes_over(self, world: World) -> World:
        epoch = world.top + 1
        done = self.mind.take_over(world.job, epoch, world.stamp)
        return self._commits(world._replace(top=epoch, deciding=True), done)

    def _reads(self, world: World) -> World:
        done = self.mind.hear(world.job, world.facts[0])
        if done.ended:
            return world._replace(deciding=False)
        return self._commits(world._replace(facts=world.facts[1:]), done)

    def accepts(self, world: World, epoch: int) -> bool:
        """Whether the commit script takes a commit of `epoch`."""
        return epoch == self.mind[world.job].epoch

    def _commits_late(self, world: World) -> World:
        assert world.held is not None
        _, epoch, done = world.held
        world = world._replace(held=None)
        return self._commits(world, done) if self.accepts(world, epoch) else world

    def _commits(self, world: World, done: Outcome, *, half: bool = False) -> World:
        a, b, trainer = world.decisions
        after = world._replace(
            job=done.half if half else done.state,
            decisions=(a + done.to[0], b + done.to[1], trainer + done.to[2]),
        )
        broken = done.broken
        if done.starts or done.routes:
            broken = broken or self._judge_decisions(world, done)
        if self.mind[after.job].epoch < self.mind[world.job].epoch:
            broken = "S10: a commit of a lower epoch is taken"
        if broken:
            raise Broken(broken, after)
        return after

    def _judge_decisions(self, world: World, done: Outcome) -> str | None:
        """What is started and routed, against what is really there. A node that was unknown is new."""
        nodes, epoch = self.mind[world.job].meta.nodes, self.mind[done.state].epoch
        for what, indexes in (("started", done.starts), ("routed", done.routes)):
            for index in indexes:
                node, agent = self.nodes[index], self.agents[world.agents[index]]
                if node.node in nodes and (rule := invariants.of_report(what, node.engine, epoch, agent)):
                    return rule
        for start in map(self.messages.__getitem__, done.decisions):
            if isinstance(start, StartEngine):
                agent = self.agents[world.agents["ab".index(start.node)]]
                if rule := invariants.of_start(start.engine, start.incarnation, agent):
                    return rule
        return None

    def _faults_of_mind(self, world: World) -> Iterator[Next]:
        yield ("! orchestrator dies",), world._replace(deciding=False)
        if not world.facts:
            return
        done = self.mind.hear(world.job, world.facts[0])
        if done.ended:
            return
        read = world._replace(facts=world.facts[1:])
        if done.half != done.state:
            yield (
                ("! orchestrator dies before its records", world.facts[0]),
                self._commits(read, done, half=True)._replace(deciding=False),
            )
        committed = self._commits(read, done)
        yield ("! reply is lost", world.facts[0]), committed._replace(held=("lost", 0, done))
        frozen = ("old", self.mind[world.job].epoch, done)
        yield ("! orchestrator freezes", world.facts[0]), world._replace(deciding=False, held=frozen)

    # --- agents ------------------------------------------------------------------------------------

    def _remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        known = self._did.get(key)
        if known is None:
            known = self._did[key] = compute()
        return known

    def _numbered(self, did: tuple[Agent, tuple[Any, ...]]) -> tuple[int, Words]:
        return self.agents.number(did[0]), tuple(map(self.messages.of, did[1]))

    def _agent_did(self, world: World, index: int, did: tuple[int, Words]) -> World:
        agent, said = did
        agents = (agent, world.agents[1]) if index == 0 else (world.agents[0], agent)
        world = world._replace(agents=agents)
        return self._say(world, index, said) if said else world

    def _say(self, world: World, source: int, said: Words) -> World:
        if world.late is not None and world.late[0] == source:
            return world._replace(late=(source, world.late[1] + said))
        return world._replace(facts=world.facts + said)

    def _of_agent(self, world: World, index: int) -> Iterator[Next]:
        number = world.agents[index]
        hears = world.decisions[index]
        if hears and self.agents[number].up:
            if hears[0] == BORN:
                did = self._did_synced(index, number, world.job, "synced")
                heard = _with(world, index, ())
            else:
                did = self._remember(
                    (index, number, hears[0], "hear"),
                    lambda: self._numbered(
                        self.nodes[index].hear(self.agents[number], self.messages[hears[0]])
                    ),
                )
                heard = _with(world, index, hears[1:])
            yield ("hears", index, hears[0]), self._agent_did(heard, index, did)
        for what, did in self._remember((index, number, "free"), lambda: self._agent_free(index, number)):
            if what == "restarts":
                did = self._did_synced(index, number, world.job, "restart")
                yield (what, index), self._agent_did(_with(world, index, ()), index, did)
            elif what == "silent":
                record = self.mind[world.job].meta.nodes.get(self.nodes[index].node)
                if world.deciding and record is not None and not record.silent and world.held is None:
                    yield ("is silent", index), self._tells(world, index)
            else:
                yield (what, index), self._agent_did(world, index, did)

    def _did_synced(self, index: int, number: int, job: int, how: str) -> tuple[int, Words]:
        node = self.nodes[index]
        act = node.restart if how == "restart" else node.synced
        return self._remember(  # type: ignore[no-any-return]
            (index, number, job, how), lambda: self._numbered(act(self.agents[number], self.mind[job]))
        )

    def _tells(self, world: World, index: int) -> World:
        silent = self.messages.of(NodeSilent(node=self.nodes[index].node, since=0))
        return self._commits(world, self.mind.hear(world.job, silent))

    def _agent_free(self, index: int, number: int) -> tuple[tuple[str, Any], ...]:
        node, agent = self.nodes[index], self.agents[number]
        if not agent.up:
            return (("restarts", None), ("silent", None))
        can: list[tuple[str, Any]] = []
        if agent.takes_up:
            can.append(("takes up", self._numbered(node.take_up(agent))))
        elif agent.running is not None:
            can.append(("finishes", self._numbered(node.finish(agent))))
        elif agent.pending:
            can.append(("begins", self._numbered(node.begin(agent))))
        if node.unnoticed(agent):
            can.append(("notices", self._numbered(node.notice(agent))))
        return tuple(can)

    def _faults_of_agent(self, world: World, index: int) -> Iterator[Next]:
        number = world.agents[index]
        for what, did in self._remember((index, number, "faults"), lambda: self._agent_faults(index, number)):
            after = self._agent_did(world, index, did)
            yield (what, index), after if self.agents[did[0]].up else _with(after, index, ())
        if "silence" in self._kinds and self.agents[number].up and world.deciding and world.held is None:
            record = self.mind[world.job].meta.nodes.get(self.nodes[index].node)
            if record is not None and not record.silent:
                yield ("! seems silent", index), self._tells(world, index)

    def _agent_faults(self, index: int, number: int) -> tuple[tuple[str, Any], ...]:
        node, agent, kinds = self.nodes[index], self.agents[number], self._kinds
        can: list[tuple[str, Any]] = []
        here = node.process(agent)
        if "death" in kinds and here is not None and here.alive:
            can.append(("! dies", self._numbered((node.dies(agent), ()))))
        if not agent.up:
            return tuple(can)
        if "agent" in kinds:
            can.append(("! agent ends", self._numbered((node.crash(agent, disk=True), ()))))
            can.append(("! agent and disk end", self._numbered((node.crash(agent, disk=False), ()))))
            if agent.running is not None and not agent.takes_up:
                can.append(("! agent ends half-way", self._numbered(node.finish_half(agent))))
        if "failure" in kinds and not agent.takes_up:
            if agent.running is not None:
                can += [("! fails", self._numbered(did)) for did in node.fail(agent)]
            elif (refused := node.refuse(agent)) is not None:
                can.append(("! refuses", self._numbered(refused)))
        return tuple(can)

    # --- the trainer -------------------------------------------------------------------------------

    def _trainer_does(self, world: World, what: Any, act: Callable[[Trainer], trainers.Said]) -> World:
        number = world.trainer

        def compute() -> tuple[int, Words]:
            trainer, said = act(self.trainers[number])
            return self.trainers.number(trainer, trainers.key(trainer)), tuple(map(self.messages.of, said))

        after, said = self._remember(("t", number, what), compute)
        return self._say(world._replace(trainer=after), 2, said)

    def _of_trainer(self, world: World) -> Iterator[Next]:
        trainer = self.trainers[world.trainer]
        hears = world.decisions[2]
        if not trainer.alive:
            yield from self._of_dead_trainer(world, trainer)
            return
        if hears:
            if hears[0] == BORN:
                told = lambda each: trainers.caught_up(each, self.mind[world.job])  # noqa: E731
                after = self._trainer_does(_with(world, 2, ()), ("born", world.job), told)
            else:
                heard = self.messages[hears[0]]
                after = self._trainer_does(
                    _with(world, 2, hears[1:]), ("hear", hears[0]), lambda each: trainers.turn(each, heard)
                )
            yield ("trainer hears", hears[0]), after
        barrier = trainer.barrier
        if barrier.running is not None:
            yield ("trainer has exported",), self._exported(world)
        elif barrier.waiting:
            yield ("trainer exports",), self._exports(world)
        opening = trainers.opening(trainer)
        if opening is not None:
            yield ("trainer opens",), self._trainer_does(world, "open", lambda e: trainers.open_(e, opening))

    def _of_dead_trainer(self, world: World, trainer: Trainer) -> Iterator[Next]:
        run = trainer.barrier.run + 1
        began = self._trainer_does(
            _with(world, 2, ()),
            ("fresh", world.job),
            lambda _: trainers.fresh(run, self.mind[world.job], pushes=self.plan.pushes),
        )
        yield ("trainer begins", run), began
        if world.deciding and world.held is None and self._is_watched(world, trainer):
            yield ("trainer is silent",), self._tells_of_trainer(world, trainer)

    def _is_watched(self, world: World, trainer: Trainer) -> bool:
        meta = self.mind[world.job].meta
        return meta.run == trainer.barrier.run and not meta.finished and not meta.trainer_silent

    def _tells_of_trainer(self, world: World, trainer: Trainer) -> World:
        silent = self.messages.of(TrainerSilent(run=trainer.barrier.run, since=0))
        return self._commits(world, self.mind.hear(world.job, silent))

    def _exports(self, world: World) -> World:
        if self.plan.pushes:
            order = self.trainers[world.trainer].barrier.waiting[0]
            world = self._pushed(world, order, version=False)
        return self._trainer_does(world, "begin", trainers.begin)

    def _exported(self, world: World) -> World:
        order = self.trainers[world.trainer].barrier.running
        assert order is not None
        dead: frozenset[tuple[str, int]] = frozenset()
        if self.plan.pushes:
            dead = frozenset(
                (str(member.engine), member.incarnation)
                for member in order.members
                if not self._is_alive(world, member.engine, member.incarnation)
            )
            world = self._pushed(world, order, version=True)
        return self._trainer_does(world, ("end", dead), lambda each: trainers.end(each, dead))

    def _is_alive(self, world: World, engine: EngineName, incarnation: int) -> bool:
        agent = self.agents[world.agents["ab".index(self._node(engine))]]
        return any(each.alive and each.incarnation == incarnation for each in agent.processes)

    def _node(self, engine: EngineName) -> str:
        return next(node.node for node in self.nodes if node.engine == engine)

    def _pushed(self, world: World, order: SyncWeights, *, version: bool, cut_off: bool = False) -> World:
        for member in order.members:
            index = "ab".index(self._node(member.engine))
            agent = self.nodes[index].pushed(
                self.agents[world.agents[index]],
                member.incarnation,
                order.version if version else None,
                cut_off=cut_off,
            )
            world = self._agent_did(world, index, (self.agents.number(agent), ()))
        return world

    def _faults_of_trainer(self, world: World) -> Iterator[Next]:
        trainer = self.trainers[world.trainer]
        if not trainer.alive or "trainer" not in self._kinds:
            return
        running = trainer.barrier.running
        hurt = self._pushed(world, running, version=False, cut_off=True) if running and self.plan.pushes else world
        dead = self._trainer_does(hurt, "dies", lambda each: (each._replace(alive=False), ()))
        yield ("! trainer dies",), _with(dead, 2, ())
        if running is not None:
            yield ("! trainer is cut off",), self._trainer_does(hurt, "close", trainers.close)
            yield ("! export fails",), self._trainer_does(world, "fails", trainers.export_fails)
        if world.deciding and world.held is None and self._is_watched(world, trainer):
            yield ("! trainer seems silent",), self._tells_of_trainer(world, trainer)

    # --- the bus -----------------------------------------------------------------------------------

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

    # --- judgement ---------------------------------------------------------------------------------

    def judge(self, world: World) -> str | None:
        """Which rule does not hold in this state."""
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
        return invariants.of_engine(state, state.engines[name], name, self.agents[agent])

    def settled(self, world: World) -> str:
        """`served`, `named` (what is not served is named by an alarm, or was taken out), or nothing."""
        job = self.mind[world.job]
        trainer = self.trainers[world.trainer]
        if trainer.barrier.open and trainer.barrier.opening is not None:
            if trainer.barrier.opening.sync == "all" and trainer.barrier.released is None:
                return ""
        if job.meta.bus != str(world.stamp) or len(job.engines) < len(self.nodes):
            return ""
        exports = trainer.barrier.opening.exports if trainer.barrier.open and trainer.barrier.opening else None
        served = True
        for engine in job.engines.values():
            if engine.phase is Phase.SERVING:
                if engine.route is None or engine.route.version != job.meta.version or engine.intent is not None:
                    return ""
            elif engine.phase in (Phase.RETIRED, Phase.STOPPED):
                served = False
            elif engine.alarmed and not (engine.phase is Phase.STALE and exports == job.meta.version):
                served = False
            else:
                return ""
        return "served" if served else "named"


def _with(world: World, receiver: int, words: Words) -> World:
    decisions = tuple(words if index == receiver else each for index, each in enumerate(world.decisions))
    return world._replace(decisions=decisions)  # type: ignore[arg-type]

