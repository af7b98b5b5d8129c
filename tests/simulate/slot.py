"""The agent's model of its slot, as the exhaustive search has it, with the names that a machine needs."""

from typing import Any

from relight.events.ids import EngineName, JobName, NodeName
from tests.search.agent import Agent, Process
from tests.search.lives import Lives


class Slot(Lives):
    """One engine slot of one job."""

    def __init__(self, job: JobName, node: NodeName, engine: EngineName, *, literal: bool) -> None:
        super().__init__(node, engine)
        self.literal = literal
        """Its port stays across incarnations."""
        self.site = f"http://{node}-{job}-{engine}:"

    def address(self, process: Process) -> str:
        return f"{self.site}{8000 if self.literal else 8000 + process.incarnation}"

    def _address(self, agent: Agent) -> str:
        return f"{self.site}{8000 if self.literal else 8000 + agent.incarnation}"

    def obey(self, agent: Agent, command: Any) -> Agent:
        """`slot.Slot.obey`."""
        return self._obey(agent, command)

    def recall(self, agent: Agent, state: Any) -> Agent:
        """`foundlings.recall`."""
        return self._recall(agent, state)
