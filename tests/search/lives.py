"""An agent's ends and beginnings, and the deaths that it notices or finds."""

from typing import Any

from relight.events.decisions import (
    LoadWeights,
)
from relight.events.facts import EngineStopped, Fact, StartFailed
from relight.orchestrator.core.job import Job
from tests.search.agent import Agent, Did, concerns
from tests.search.node import Node


class Lives(Node):
    """A node whose agent and engine may end."""

    def dies(self, agent: Agent) -> Agent:
        """The engine of the record dies; what it leaves is there until it is proven gone."""
        return self._changed(agent, alive=False)

    def crash(self, agent: Agent, *, disk: bool) -> Agent:
        agent = agent._replace(up=False, running=None, pending=(), takes_up=False, found=0)
        if disk:
            return agent
        return Agent(up=False, obeyed=agent.obeyed, gone=agent.gone, processes=agent.processes)

    def finish_half(self, agent: Agent) -> Did:
        """The agent ends between what it writes down and what it says: only an end is said first."""
        done, said = self.finish(agent)
        if isinstance(said[0], EngineStopped | StartFailed):
            return self.crash(agent._replace(processes=done.processes), disk=True), said
        return self.crash(done, disk=True), ()

    def restart(self, agent: Agent, job: Job) -> Did:
        """Adopt what an earlier life left, take the state of the bus up and report."""
        agent, said = self.adopt(agent)
        agent, reported = self.synced(agent, job)
        return agent, (*said, *reported)

    def adopt(self, agent: Agent) -> Did:
        """Take up what an earlier life left, and say the deaths that it did not see."""
        said: tuple[Fact, ...] = ()
        agent = agent._replace(up=True)
        if agent.phase == "absent":
            agent = agent._replace(found=max((each.incarnation for each in agent.processes), default=0))
        elif self.unnoticed(agent):
            agent, said = self.notice(agent)
        if agent.phase == "starting":
            agent = agent._replace(phase="stopping", takes_up=True)
        elif agent.phase == "stopping" or (agent.phase == "up" and agent.load and not agent.dead):
            agent = agent._replace(takes_up=True)
        return agent, said

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
        if state is not None and self.node in state.nodes:
            agent = self._recall(agent, state)
        said = self.report(agent)
        epoch = max(agent.epoch, job.epoch)
        agent = agent._replace(epoch=epoch, obeyed=max(agent.obeyed, epoch))
        if state is None or state.intent is None or state.intent.epoch < job.epoch:
            return agent, (said,)
        if not concerns(state.intent, self.node, head=state.node):
            return agent, (said,)
        agent, more = self.hear(agent, state.intent)
        return agent, (said, *more)

    def _recall(self, agent: Agent, state: Any) -> Agent:
        """An incarnation of a lost disk, where all that the orchestrator knows of it still holds."""
        alive = [each for each in agent.processes if each.incarnation == state.incarnation and each.alive]
        told = state.parts[self.part - 1].up == state.incarnation if self.part else state.address is not None
        if agent.phase != "absent" or agent.found != state.incarnation or not alive or not told:
            return agent
        if isinstance(state.intent, LoadWeights):
            return agent  # half of it may be written
        paused = not alive[0].serves or alive[0].weights is None
        return agent._replace(
            incarnation=state.incarnation, phase="up", dead=False, paused=paused, holds=state.version, found=0
        )
