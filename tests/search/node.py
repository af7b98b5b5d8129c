"""The node agent of one engine, and the engine: a small model of `agents/node`, record by record.

What is on disk survives a crash of the agent; what is in memory does not; processes outlive both. An
operation that takes time is two steps, so that anything may happen in between.
"""

from typing import Any

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
    NodeSilent,
    StartFailed,
    StopFailed,
    WeightsFailed,
)
from relight.events.values import Cause
from relight.events.version import BASE
from tests.search.agent import Agent, Did, Process, Voice


class Node(Voice):
    """What the agent of one node does. Pure: the agent before, the agent after and what it says."""

    # --- commands ------

    def hear(self, agent: Agent, decision: Any) -> Did:
        if isinstance(decision, NodeSilent):
            return agent, (self.report(agent),)
        if decision.dry_run and not isinstance(decision, ReportRequested):
            return agent, ()
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

    # --- operations ------

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
        again = order.incarnation <= agent.gone
        fresh = Process(order.incarnation, weights=weights or BASE, label=weights, again=again)
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

    def fail(self, agent: Agent) -> list[Did]:
        """The ways in which the operation that runs may come to nothing."""
        order = agent.running
        agent = agent._replace(running=None)
        match order:
            case StartEngine():
                return [self._fail_start(agent, order)]
            case StopEngine():
                said = StopFailed(
                    engine=self.engine,
                    incarnation=agent.incarnation,
                    node=self.at,
                    cause="process",
                    answers=order.id,
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
        agent = self._changed(agent, label=label, proven=right, serves=True, failed=False)
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
        return self._changed(agent._replace(paused=True), serves=False, proven=None, failed=True), (said,)

    def _probe(self, agent: Agent, order: ProbeEngine) -> Did:
        here = self.process(agent)
        assert here is not None
        if not here.alive:
            return self.notice(agent)
        version = here.label or agent.holds or BASE  # a push moves the label, and not what its agent loaded
        return agent, (self._healthy(agent, version, order.id),)

    def unnoticed(self, agent: Agent) -> bool:
        here = self.process(agent)
        return agent.phase == "up" and not agent.dead and (here is None or not here.alive)

    def notice(self, agent: Agent) -> Did:
        running = agent.running if isinstance(agent.running, StopEngine) else None
        said = EngineDead(
            engine=self.engine, incarnation=agent.incarnation, node=self.at, cause=Cause.SIGNAL, signal=9
        )
        return agent._replace(dead=True, running=running), (said,)
