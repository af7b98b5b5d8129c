"""The node agent of one engine, and the engine: a small model of `agents/node`, record by record.

What is on disk survives a crash of the agent; what is in memory does not; processes outlive both. An
operation that takes time is two steps, so that anything may happen in between.
"""

from typing import Any, NamedTuple

from relight.events.decisions import (
    LoadWeights,
    ProbeEngine,
    ReportRequested,
    StartEngine,
    StopEngine,
    VerifyEngine,
)
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Fact,
    Healthy,
    NodeSilent,
    NodeUp,
    StartFailed,
    StopFailed,
    WeightsFailed,
    WeightsLoaded,
)
from relight.events.ids import BootId, DecisionId, EngineName, NodeName
from relight.events.values import Canary, Cause, EngineReport, Proof
from relight.events.version import BASE, Version
from relight.orchestrator.core.job import Job

CANARY = Canary(tokens=(1, 2), logprobs=(-1.0,))
PROOF = Proof(port_free=True)


class Process(NamedTuple):
    """An incarnation on the machine, as it really is."""

    incarnation: int
    alive: bool = True
    """False: it serves nobody, and something of it is still there."""
    weights: Version | None = BASE
    """None while nobody can say."""
    label: Version | None = None
    serves: bool = False
    """It was resumed after a proof, and is paused for a load at most."""
    proven: Version | None = None
    """What it was proven to hold since its weights were last written."""
    cut_off: bool = False
    """A push that was cut off has written into it."""


class Agent(NamedTuple):
    """On disk: from `epoch` to `then`. In memory: the rest, less the processes."""

    up: bool = True
    epoch: int = 0
    obeyed: int = 0
    """The highest epoch that any life of it has obeyed: for the rules alone."""
    incarnation: int = 0
    phase: str = "absent"
    dead: bool = False
    paused: bool = True
    holds: Version | None = None
    started_on: Version | None = None
    start: StartEngine | None = None
    stop: StopEngine | None = None
    load: LoadWeights | None = None
    ended: EngineStopped | StartFailed | None = None
    then: str = "restart"
    running: Any = None
    pending: tuple[Any, ...] = ()
    takes_up: bool = False
    found: int = 0
    """The highest incarnation that lives without a record."""
    processes: tuple[Process, ...] = ()


Did = tuple[Agent, tuple[Fact, ...]]


class Node:
    """What the agent of `node` does. Pure: the agent before, the agent after and what it says."""

    def __init__(self, node: NodeName, engine: EngineName) -> None:
        self.node = node
        self.engine = engine

    # --- commands ----------------------------------------------------------------------------------

    def hear(self, agent: Agent, decision: Any) -> Did:
        if isinstance(decision, NodeSilent):
            return agent, (self.report(agent),)
        if decision.epoch < agent.epoch:
            return agent, (self.report(agent),)
        agent = agent._replace(epoch=decision.epoch, obeyed=max(agent.obeyed, decision.epoch))
        if isinstance(decision, ReportRequested):
            return agent, (self.report(agent, decision.id),)
        return self._obey(agent, decision), ()

    def _obey(self, agent: Agent, command: Any) -> Agent:
        if isinstance(command, StopEngine):
            running = agent.running
            same = command.incarnation == agent.incarnation
            if isinstance(running, StopEngine) and running.incarnation == command.incarnation and same:
                return agent._replace(stop=command)
            running = running if isinstance(running, StopEngine) else None
            agent = agent._replace(pending=(), running=running)
        elif command == agent.running:
            return agent
        if any(type(each) is type(command) for each in agent.pending):
            pending = tuple(command if type(each) is type(command) else each for each in agent.pending)
        else:
            pending = (*agent.pending, command)
        return agent._replace(pending=pending)

    def report(self, agent: Agent, answers: DecisionId | None = None) -> NodeUp:
        state, incarnation, address, version = agent.phase, agent.incarnation, None, None
        if agent.found:
            state, incarnation = "unknown", agent.found
        elif agent.phase == "absent":
            state = agent.then if agent.then != "restart" else "absent"
        elif agent.phase == "up":
            state = "absent" if agent.dead else "paused" if agent.paused else "up"
            if not agent.dead:
                address, version = self._address(agent), None if agent.load else agent.holds
        seen = EngineReport(
            engine=self.engine,
            incarnation=incarnation,
            state=state,  # type: ignore[arg-type]
            address=address,
            version=version,
        )
        return NodeUp(
            node=self.node, boot=BootId("b"), max_epoch=agent.epoch, engines=(seen,), answers=answers
        )

    def _address(self, agent: Agent) -> str:
        return f"http://{self.engine}.{agent.incarnation}"

    # --- operations --------------------------------------------------------------------------------

    def begin(self, agent: Agent) -> Did:
        """Take up the next command; one that takes time is `running` after it."""
        command, pending = agent.pending[0], agent.pending[1:]
        agent = agent._replace(pending=pending)
        match command:
            case StartEngine():
                return self._begin_start(agent, command)
            case StopEngine():
                return self._begin_stop(agent, command)
            case _ if agent.phase != "up" or agent.dead or command.incarnation != agent.incarnation:
                return agent, ()
            case ProbeEngine():
                return self._probe(agent, command)
            case LoadWeights():
                return self._begin_load(agent, command)
            case VerifyEngine():
                return self._verify(agent, command)
            case _:
                raise AssertionError(command)

    def _begin_start(self, agent: Agent, order: StartEngine) -> Did:
        if order.incarnation < agent.incarnation:
            return agent, ()
        if order.incarnation == agent.incarnation:
            if agent.phase == "up" and not agent.dead:
                return agent, (self._started(agent, order),)
            if agent.phase == "absent" and isinstance(agent.ended, StartFailed):
                return agent, (self._start_failed(order.incarnation, order.id),)
            return agent, ()
        begun = any(each.incarnation == order.incarnation for each in agent.processes)
        left = tuple(each for each in agent.processes if each.incarnation > order.incarnation)
        agent = agent._replace(processes=left, phase="absent", found=0)
        if begun:
            lost = self._start_failed(order.incarnation, order.id)
            return self._ended(agent._replace(incarnation=order.incarnation), lost), (lost,)
        weights = order.weights.version if order.weights else None
        fresh = Process(order.incarnation, weights=weights or BASE, label=weights)
        agent = agent._replace(
            incarnation=order.incarnation,
            phase="starting",
            dead=False,
            paused=True,
            holds=None,
            started_on=None,
            start=order,
            stop=None,
            load=None,
            ended=None,
            then="restart",
            running=order,
            processes=(*agent.processes, fresh),
        )
        return agent, ()

    def _begin_stop(self, agent: Agent, order: StopEngine) -> Did:
        if order.incarnation == agent.incarnation and agent.phase != "absent":
            return agent._replace(phase="stopping", stop=order, running=order), ()
        stopped = self._stopped(order.incarnation, order.id)
        if order.incarnation == agent.incarnation:
            return agent._replace(then=order.then), (stopped,)
        agent = self._without(agent, order.incarnation)
        if order.incarnation > agent.incarnation and agent.phase == "absent":
            agent = agent._replace(incarnation=order.incarnation, stop=order)
            agent = self._ended(agent, stopped, then=order.then)
        return agent, (stopped,)

    def _begin_load(self, agent: Agent, order: LoadWeights) -> Did:
        if agent.holds == order.version:
            return agent, (self._loaded(agent, order),)
        if agent.holds is not None and order.version < agent.holds:
            return agent, (self._load_failed(order, touched=False),)
        agent = self._written(agent, weights=None, label=None)
        return agent._replace(load=order, running=order), ()

    def finish(self, agent: Agent) -> Did:
        """The operation that runs comes to its end."""
        order = agent.running
        agent = agent._replace(running=None)
        here = self.process(agent)
        match order:
            case StartEngine() if here is None or not here.alive:
                return self._fail_start(agent, order)
            case StartEngine():
                weights = order.weights.version if order.weights else None
                agent = agent._replace(phase="up", started_on=weights, holds=weights)
                return agent, (self._started(agent, order),)
            case StopEngine():
                newest = agent.stop or order
                stopped = self._stopped(agent.incarnation, newest.id)
                agent = self._without(agent, agent.incarnation)
                return self._ended(agent, stopped, then=newest.then), (stopped,)
            case LoadWeights() if here is None or not here.alive:
                return self._fail_load(agent, order, touched=True)
            case LoadWeights():
                proven = None if agent.paused else order.version
                agent = self._changed(agent, serves=not agent.paused)
                agent = self._written(agent, weights=order.version, label=order.version, proven=proven)
                return agent._replace(load=None, holds=order.version), (self._loaded(agent, order),)
            case _:
                raise AssertionError(order)

    def finish_half(self, agent: Agent) -> Did:
        """The agent ends between what it writes down and what it says: an end is said first, all else after."""
        done, said = self.finish(agent)
        if isinstance(said[0], EngineStopped | StartFailed):
            return self.crash(agent._replace(processes=done.processes), disk=True), said
        return self.crash(done, disk=True), ()

    def fail(self, agent: Agent) -> list[Did]:
        """The ways in which the operation that runs may come to nothing."""
        order = agent.running
        agent = agent._replace(running=None)
        match order:
            case StartEngine():
                return [self._fail_start(agent, order)]
            case StopEngine():
                said = StopFailed(
                    engine=self.engine, incarnation=agent.incarnation, cause="process", answers=order.id
                )
                return [(agent, (said,))]
            case LoadWeights():
                return [self._fail_load(agent, order, touched=True)]
            case _:
                return []

    def refuse(self, agent: Agent) -> Did | None:
        """The next command fails before it touched anything, or as soon as it was tried."""
        command = agent.pending[0] if agent.pending else None
        if agent.phase != "up" or agent.dead or command is None or command.incarnation != agent.incarnation:
            return None
        agent = agent._replace(pending=agent.pending[1:])
        match command:
            case LoadWeights() if agent.holds != command.version:
                return agent, (self._load_failed(command, touched=False),)
            case VerifyEngine():
                return self._unproven(agent, command)
            case _:
                return None

    def _fail_start(self, agent: Agent, order: StartEngine) -> Did:
        failed = self._start_failed(order.incarnation, order.id)
        return self._ended(self._without(agent, order.incarnation), failed), (failed,)

    def _fail_load(self, agent: Agent, order: LoadWeights, *, touched: bool) -> Did:
        return agent._replace(load=None, holds=None), (self._load_failed(order, touched=touched),)

    def _verify(self, agent: Agent, order: VerifyEngine) -> Did:
        here = self.process(agent)
        assert here is not None
        label = BASE if order.version == BASE and agent.holds is None else here.label
        if not here.alive or label != order.version:
            return self._unproven(agent, order)
        right = order.version if here.weights == order.version else None
        agent = self._changed(agent, label=label, proven=right, serves=True)
        agent = agent._replace(paused=False, holds=order.version)
        return agent, (self._healthy(agent, order.version, order.id),)

    def _unproven(self, agent: Agent, order: VerifyEngine) -> Did:
        said = WeightsFailed(
            engine=self.engine,
            incarnation=order.incarnation,
            version=order.version,
            error="unproven",
            touched=True,
            answers=order.id,
        )
        return self._changed(agent._replace(paused=True), serves=False), (said,)

    def _probe(self, agent: Agent, order: ProbeEngine) -> Did:
        here = self.process(agent)
        assert here is not None
        if not here.alive:
            return self.notice(agent)
        version = agent.holds or here.label or BASE
        return agent, (self._healthy(agent, version, order.id),)

    # --- lives and deaths --------------------------------------------------------------------------

    def unnoticed(self, agent: Agent) -> bool:
        here = self.process(agent)
        return agent.phase == "up" and not agent.dead and (here is None or not here.alive)

    def notice(self, agent: Agent) -> Did:
        running = agent.running if isinstance(agent.running, StopEngine) else None
        said = EngineDead(engine=self.engine, incarnation=agent.incarnation, cause=Cause.SIGNAL, signal=9)
        return agent._replace(dead=True, running=running), (said,)

    def dies(self, agent: Agent) -> Agent:
        """The engine of the record dies; what it leaves is there until it is proven gone."""
        return self._changed(agent, alive=False)

    def crash(self, agent: Agent, *, disk: bool) -> Agent:
        agent = agent._replace(up=False, running=None, pending=(), takes_up=False, found=0)
        if disk:
            return agent
        return Agent(up=False, obeyed=agent.obeyed, processes=agent.processes)

    def restart(self, agent: Agent, job: Job) -> Did:
        """Adopt what an earlier life left, take the state of the bus up and report."""
        agent, said = agent._replace(up=True), ()
        if agent.phase == "absent":
            agent = agent._replace(found=max((each.incarnation for each in agent.processes), default=0))
        elif self.unnoticed(agent):
            agent, said = self.notice(agent)
        if agent.phase == "starting":
            agent = agent._replace(phase="stopping", takes_up=True)
        elif agent.phase == "stopping" or (agent.phase == "up" and agent.load and not agent.dead):
            agent = agent._replace(takes_up=True)
        agent, reported = self.synced(agent, job)
        return agent, (*said, *reported)

    def take_up(self, agent: Agent) -> Did:
        """Finish what an earlier life began."""
        agent = agent._replace(takes_up=False)
        if agent.phase == "stopping" and agent.start is not None and agent.stop is None:
            failed = self._start_failed(agent.incarnation, agent.start.id)
            return self._ended(self._without(agent, agent.incarnation), failed), (failed,)
        if agent.phase == "stopping":
            if agent.pending:
                return agent, ()
            return self.finish(agent._replace(running=agent.stop))
        if agent.load is not None and not agent.dead:
            return self._fail_load(agent, agent.load, touched=True)
        return agent, ()

    def synced(self, agent: Agent, job: Job) -> Did:
        """The state was read anew, on a start or because the bus is another one."""
        state = job.engines.get(self.engine)
        if state is not None and state.node == self.node:
            agent = self._recall(agent, state)
        said = self.report(agent)
        epoch = max(agent.epoch, job.epoch)
        agent = agent._replace(epoch=epoch, obeyed=max(agent.obeyed, epoch))
        if state is None or state.intent is None or state.intent.epoch < job.epoch:
            return agent, (said,)
        agent, more = self.hear(agent, state.intent)
        return agent, (said, *more)

    def _recall(self, agent: Agent, state: Any) -> Agent:
        """An incarnation of a lost disk, where all that the orchestrator knows of it still holds."""
        alive = [each for each in agent.processes if each.incarnation == state.incarnation and each.alive]
        if agent.phase != "absent" or agent.found != state.incarnation or not alive or state.address is None:
            return agent
        if isinstance(state.intent, LoadWeights):
            return agent  # half of it may be written
        paused = not alive[0].serves or alive[0].weights is None
        return agent._replace(
            incarnation=state.incarnation, phase="up", dead=False, paused=paused, holds=state.version, found=0
        )

    # --- the machine -------------------------------------------------------------------------------

    def process(self, agent: Agent) -> Process | None:
        return next((each for each in agent.processes if each.incarnation == agent.incarnation), None)

    def _changed(self, agent: Agent, **changes: Any) -> Agent:
        processes = tuple(
            each._replace(**changes) if each.incarnation == agent.incarnation else each
            for each in agent.processes
        )
        return agent._replace(processes=processes)

    def _written(
        self, agent: Agent, *, weights: Version | None, label: Version | None, proven: Version | None = None
    ) -> Agent:
        return self._changed(agent, weights=weights, label=label, proven=proven)

    def _without(self, agent: Agent, incarnation: int) -> Agent:
        left = tuple(each for each in agent.processes if each.incarnation != incarnation)
        found = agent.found if agent.found != incarnation else 0
        return agent._replace(processes=left, found=found)

    def pushed(self, agent: Agent, incarnation: int, version: Version | None, *, cut_off: bool = False) -> Agent:
        """A push writes into the engine; None while it runs, or when nobody can say what it wrote."""
        written: list[Process] = []
        for each in agent.processes:
            if each.alive and each.incarnation == incarnation:
                each = each._replace(weights=version, label=version, cut_off=each.cut_off or cut_off)  # noqa: PLW2901
                each = each._replace(proven=version if each.serves else None)  # noqa: PLW2901
            written.append(each)
        return agent._replace(processes=tuple(written))

    # --- words -------------------------------------------------------------------------------------

    def _ended(self, agent: Agent, fact: EngineStopped | StartFailed, *, then: str = "restart") -> Agent:
        return agent._replace(phase="absent", dead=False, ended=fact, then=then, load=None)

    def _healthy(self, agent: Agent, version: Version, answers: DecisionId) -> Healthy:
        return Healthy(
            engine=self.engine,
            incarnation=agent.incarnation,
            address=self._address(agent),
            version=version,
            canary=CANARY,
            answers=answers,
        )

    def _started(self, agent: Agent, order: StartEngine) -> EngineStarted:
        return EngineStarted(
            engine=self.engine,
            incarnation=agent.incarnation,
            address=self._address(agent),
            weights=agent.started_on,
            answers=order.id,
        )

    def _start_failed(self, incarnation: int, answers: DecisionId) -> StartFailed:
        return StartFailed(
            engine=self.engine, incarnation=incarnation, cause="exit", proof=PROOF, answers=answers
        )

    def _stopped(self, incarnation: int, answers: DecisionId) -> EngineStopped:
        return EngineStopped(
            engine=self.engine, incarnation=incarnation, node=self.node, proof=PROOF, answers=answers
        )

    def _loaded(self, agent: Agent, order: LoadWeights) -> WeightsLoaded:
        return WeightsLoaded(
            engine=self.engine,
            incarnation=order.incarnation,
            sync=order.sync,
            version=order.version,
            digest=order.digest,
            answers=order.id,
        )

    def _load_failed(self, order: LoadWeights, *, touched: bool) -> WeightsFailed:
        return WeightsFailed(
            engine=self.engine,
            incarnation=order.incarnation,
            sync=order.sync,
            version=order.version,
            error="bad shard",
            touched=touched,
            answers=order.id,
        )
