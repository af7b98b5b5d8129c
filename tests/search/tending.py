"""The node agents in the world: what they hear, do and suffer."""

from collections.abc import Iterator
from typing import Any

from relight.events.facts import NodeSilent
from tests.search.parts import Parts
from tests.search.world import BORN, Next, Words, World, told


class Tending(Parts):
    def _of_agent(self, world: World, index: int) -> Iterator[Next]:
        number = world.agents[index]
        hears = world.decisions[index]
        if hears and self.agents[number].up:
            if hears[0] == BORN:
                did = self._did_synced(index, number, world.job, "synced")
                heard = told(world, index, ())
            else:
                did = self._remember(
                    (index, number, hears[0], "hear"),
                    lambda: self._numbered(
                        self.nodes[index].hear(self.agents[number], self.messages[hears[0]])
                    ),
                )
                heard = told(world, index, hears[1:])
            yield ("hears", index, hears[0]), self._agent_did(heard, index, did)
        for what, did in self._remember((index, number, "free"), lambda: self._agent_free(index, number)):
            if what == "restarts":
                restarted = self._did_synced(index, number, world.job, "restart")
                yield (what, index), self._agent_did(told(world, index, ()), index, restarted)
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
            yield (what, index), after if self.agents[did[0]].up else told(after, index, ())
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

    def _tells(self, world: World, index: int) -> World:
        silent = self.messages.of(NodeSilent(node=self.nodes[index].node, since=0))
        return self._commits(world, self.mind.hear(world.job, silent))
