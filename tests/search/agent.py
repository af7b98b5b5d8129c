"""A node agent and its machine as values: what it keeps, what lives there, and what it says of both."""

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
    EngineStarted,
    EngineStopped,
    Fact,
    Healthy,
    NodeSilent,
    NodeUp,
    StartFailed,
    WeightsFailed,
    WeightsLoaded,
)
from relight.events.ids import BootId, DecisionId, EngineName, NodeName
from relight.events.values import Canary, EngineReport, Proof
from relight.events.version import BASE, Version


def computed(weights: Version | None) -> Canary:
    """What an engine computes with the weights of a version; None: with what a broken load left."""
    return Canary(tokens=(1, 2), logprobs=(-99.0 if weights is None else -1.0 - weights.step,))


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
    failed: bool = False
    """Its last proof failed, which its agent has said."""
    again: bool = False
    """Begun a second time under its number, by an agent that had lost its disk."""
    cut_off: bool = False
    """A push that was cut off has written into it."""


class Agent(NamedTuple):
    """On disk: `epoch` to `then`, less what is for the rules. In memory: the rest, less the processes."""

    up: bool = True
    epoch: int = 0
    obeyed: int = 0
    """The highest epoch that any life of it has obeyed: for the rules alone."""
    gone: int = 0
    """The highest incarnation that any life of it has proven gone: for the rules alone."""
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


def concerns(message: Any, node: str, *, head: str) -> bool:
    """Whether the agent of `node` is to hear of it; `head`: where the engine's head is."""
    match message:
        case StartEngine():
            return node in (message.node, *message.parts)
        case StopEngine():
            return node in (message.node, *(place.node for place in message.others))
        case ReportRequested() | NodeSilent():
            return message.node == node
        case ProbeEngine() | LoadWeights() | VerifyEngine():
            return node == head
        case _:
            return False


class Voice:
    """The words of the agent of `node`, and what happens to its machine."""

    def __init__(self, node: NodeName, engine: EngineName, *, part: int = 0, parts: int = 1) -> None:
        self.node = node
        self.engine = engine
        self.part = part
        self.parts = parts
        self.at = node if parts > 1 else None
        """What its facts name."""

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
            part=self.part,
            parts=self.parts,
        )
        return NodeUp(
            node=self.node, boot=BootId("b"), max_epoch=agent.epoch, engines=(seen,), answers=answers
        )

    def _address(self, agent: Agent) -> str:
        return "" if self.part else f"http://{self.engine}.{agent.incarnation}"

    def _ended(self, agent: Agent, fact: EngineStopped | StartFailed, *, then: str = "restart") -> Agent:
        gone = max(agent.gone, fact.incarnation)
        return agent._replace(phase="absent", dead=False, ended=fact, then=then, load=None, gone=gone)

    def _healthy(self, agent: Agent, version: Version, answers: DecisionId) -> Healthy:
        here = self.process(agent)
        assert here is not None
        return Healthy(
            engine=self.engine,
            incarnation=agent.incarnation,
            address=self._address(agent),
            version=version,
            canary=computed(here.weights),
            answers=answers,
        )

    def _started(self, agent: Agent, order: StartEngine) -> EngineStarted:
        return EngineStarted(
            engine=self.engine,
            incarnation=agent.incarnation,
            node=self.at,
            address=self._address(agent),
            weights=agent.started_on,
            answers=order.id,
        )

    def _start_failed(self, incarnation: int, answers: DecisionId) -> StartFailed:
        return StartFailed(
            engine=self.engine,
            incarnation=incarnation,
            node=self.at,
            cause="exit",
            proof=PROOF,
            answers=answers,
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

    # --- the machine ------

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

    def pushed(
        self, agent: Agent, incarnation: int, version: Version | None, *, cut_off: bool = False
    ) -> Agent:
        """A push writes into the engine; None while it runs, or when nobody can say what it wrote."""
        written: list[Process] = []
        for each in agent.processes:
            if each.alive and each.incarnation == incarnation:
                each = each._replace(weights=version, label=version, cut_off=each.cut_off or cut_off)  # noqa: PLW2901
                each = each._replace(proven=version if each.serves else None)  # noqa: PLW2901
            written.append(each)
        return agent._replace(processes=tuple(written))
