"""What every part of the model has: pools, a memory of what was computed, a voice, and the commit."""

from collections.abc import Callable
from typing import Any

from relight.events.decisions import RouteAdded, StartEngine
from relight.events.facts import Healthy, WeightsFailed
from relight.events.ids import EngineName, NodeName
from tests.search import invariants
from tests.search.agent import Agent
from tests.search.lives import Lives
from tests.search.mind import ENGINES, NODES, REBORN, Mind, Outcome
from tests.search.pool import Messages, Pool
from tests.search.trainer import Trainer
from tests.search.world import Broken, Plan, Words, World


def _lives(plan: Plan, node: str, part: int) -> Lives:
    if plan.parts:
        return Lives(NodeName(node), EngineName("e0"), part=part, parts=2)
    return Lives(NodeName(node), ENGINES[NodeName(node)])


class Parts:
    """Every part's answer is computed once and then remembered."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.messages = Messages()
        self.mind = Mind(plan.settings, self.messages, pushes=plan.pushes)
        self.agents: Pool[Agent] = Pool()
        self.trainers: Pool[Trainer] = Pool()
        self.nodes = tuple(_lives(plan, node, part) for part, node in enumerate("ab"))
        self._did: dict[Any, Any] = {}
        self._judged: dict[tuple[int, int, int], str | None] = {}
        self._kinds = plan.kinds

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

    def accepts(self, world: World, epoch: int) -> bool:
        """Whether the commit script takes a commit of `epoch`."""
        return epoch == self.mind[world.job].epoch

    def _commits(self, world: World, done: Outcome, *, heard: int | None = None, half: bool = False) -> World:
        a, b, trainer = world.decisions
        after = world._replace(
            job=done.half if half else done.state,
            decisions=(a + done.to[0], b + done.to[1], trainer + done.to[2]),
        )
        broken = done.broken
        if done.starts or done.routes:
            broken = broken or self._judge_decisions(world, done, heard)
        if self.mind[after.job].epoch < self.mind[world.job].epoch:
            broken = "S10: a commit of a lower epoch is taken"
        if broken:
            raise Broken(broken, after)
        return after

    def _is_unsaid(self, world: World, heard: int | None) -> bool:
        """Whether the agent, after its own restart, has proven it once more in vain, which is unread."""
        proof = self.messages[heard] if heard is not None else None
        unread = (*world.facts, *(world.late[1] if world.late is not None else ()))
        return isinstance(proof, Healthy) and any(
            isinstance(fact, WeightsFailed) and fact.answers == proof.answers
            for fact in map(self.messages.__getitem__, unread)
        )

    def _judge_decisions(self, world: World, done: Outcome, heard: int | None) -> str | None:
        """What is started and routed, against what is really there.

        A node that was unknown is new, and on an emptied bus all were: nothing older can reach them.
        """
        meta, epoch = self.mind[world.job].meta, self.mind[done.state].epoch
        nodes = meta.nodes if meta.birth != REBORN else {}
        for what, indexes in (("started", done.starts), ("routed", done.routes)):
            for index in indexes:
                node, agent = self.nodes[index], self.agents[world.agents[index]]
                if node.node in nodes and (rule := invariants.of_report(what, node.engine, epoch, agent)):
                    return rule
        for said in map(self.messages.__getitem__, done.decisions):
            if isinstance(said, StartEngine) and not said.dry_run:
                rules = (
                    invariants.of_start(
                        said.engine, said.incarnation, self.agents[world.agents["ab".index(node)]]
                    )
                    for node in (said.node, *said.parts)
                )
                rule = next(filter(None, rules), None)
            elif isinstance(said, RouteAdded) and done.routes and not self._is_unsaid(world, heard):
                rule = invariants.of_route(said, self.agents[world.agents["ab".index(NODES[said.engine])]])
            else:
                continue
            if rule:
                return rule
        return None
