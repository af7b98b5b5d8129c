"""The rules S1 to S12, asked after each step of a core, each commit, and each change of what is really there.

Most questions are those of the exhaustive search (`tests.search.invariants`), asked of the same values. What
is really there is the model's own account: nobody is believed. A rule that does not hold ends the run.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from relight.events.decisions import (
    Decision,
    RecoveryFinished,
    RouteAdded,
    StartEngine,
    StopEngine,
    VerifyEngine,
)
from relight.events.facts import NodeSilent, TrainerSilent
from relight.events.ids import DecisionId, EntryId, NodeName, RecoveryId, agent_source
from relight.events.values import Member, Phase
from relight.events.version import Version
from relight.orchestrator.core import step as core
from relight.orchestrator.core.job import Job as CoreJob
from relight.orchestrator.core.job import Step
from tests.search import invariants
from tests.simulate import standing
from tests.simulate.once import Once
from tests.simulate.server import position
from tests.simulate.words import READ_S

if TYPE_CHECKING:
    from tests.simulate.machine import Engine, Sampled
    from tests.simulate.trainer import Trainer
    from tests.simulate.world import Job


SPEAKS_S = 4.0
"""Who has pulsed for so long is seen to."""


ENDLESS, ENDLESS_S = 1000, 10.0
"""Who decides so much within so long answers answers."""


GRACE_S = 1.5
"""What two looks may differ by."""


class Intended(NamedTuple):
    """What a term is about to commit."""

    step: Step
    cursor: EntryId
    first: EntryId | None
    """The first fact that it follows from, if it does from any."""
    at_s: float
    """When it was decided."""
    at: int
    """The same in bus time (ms), as far as the term knows it."""


class Judge(Once):
    """One job's."""

    def __init__(self, job: "Job") -> None:
        super().__init__(job)
        self.job: CoreJob | None = None
        """As it stands on the bus."""
        self.number = 0
        self._cursor = EntryId("0-0")
        self._life = -1
        """The server that `number` and `cursor` are counted on."""
        self._taken: set[tuple[int, int]] = set()
        """Commits: epoch and number."""
        self._intended: dict[tuple[int, int], Intended] = {}
        self._ids: dict[DecisionId, int] = {}
        """Of committed decisions, each with the bus that it was committed on."""
        self._finished: set[RecoveryId] = set()
        self._since: dict[NodeName, int] = {}
        """The epoch under which each node was first heard of on this bus."""
        self._alone: set[Version] = set()
        self._counted_from_s = 0.0
        self._counted = 0
        """Decisions since then."""

    def _ask(self, broken: str | None) -> None:
        if broken:
            rule, _, what = broken.partition(": ")
            self.broken(rule, what)

    # --- the core and its commits ------------------------------------------------------------------

    def stepped(self, before: CoreJob, heard: Any, done: Step) -> None:
        """The core has taken a step."""
        self._ask(invariants.of_step(before, heard, done))
        self._ask(standing.of_step(before, heard, done))

    def intends(self, epoch: int, number: int, intended: Intended) -> None:
        self._intended[epoch, number] = intended

    def believes(self, epoch: int, number: int) -> None:
        """A term goes on as if its commit had been taken."""
        if (epoch, number) not in self._taken:
            self.broken("S10", f"epoch {epoch} goes on after commit {number}, which was not taken")

    def forget(self) -> None:
        """The bus was emptied or rolled back: what stood on it is gone."""
        self._life = -1
        self._finished.clear()
        self._since.clear()
        self.forgets()

    def is_current(self) -> bool:
        """Whether `job` is what stands on the server that there is."""
        here = self._life == self._job.world.server.life
        return here and self.job is not None and self.job.meta.bus == self._stamp()

    def committed(self, keys: list[str], args: list[str]) -> None:
        """The server has taken a commit."""
        if keys != [self._keys.lease, self._keys.state, self._keys.decisions]:
            self.broken("S12", f"a commit touches {keys}")
        server = self._job.world.server
        epoch, number = int(args[1]), int(args[3])
        if not (server.get(self._keys.lease) or "").startswith(f"{epoch}:"):
            self.broken("S10", f"a commit of epoch {epoch} is taken after its lease has ended")
        intended = self._intended.pop((epoch, number), None)
        if intended is None:
            self.broken("S10", f"commit {number} of epoch {epoch} is taken again")
            return
        before, job = self.job, intended.step.job
        if self._life == server.life:
            if number != self.number + 1:
                self.broken("S10", f"commit {number} is taken after {self.number}")
            if before is not None and epoch < before.epoch:
                self.broken("S10", f"a commit of epoch {epoch} is taken after one of {before.epoch}")
            first = intended.first
            if first is not None and position(first) <= position(self._cursor):
                self.broken("S10", f"fact {first} takes effect again, after a commit up to {self._cursor}")
            if position(intended.cursor) < position(self._cursor):
                self.broken("S10", f"the cursor goes back from {self._cursor} to {intended.cursor}")
        else:
            before = None
        self._life, self.number, self._cursor, self.job = server.life, number, intended.cursor, job
        self._taken.add((epoch, number))
        self._counts(len(intended.step.decisions))
        self._ask(standing.of_job(job))
        if before is not None:
            self._ask(standing.of_waits(before, job, intended.at))
        for engine in job.engines.values():
            record = job.meta.nodes.get(engine.node)
            if engine.route is not None and record is not None and record.silent:
                self.broken("L6", f"{engine.route.address} is routed on node {engine.node}, which is silent")
        for node in job.meta.nodes:
            self._since.setdefault(node, job.epoch)
        for decision in intended.step.decisions:
            if isinstance(decision, Decision):
                self._decided(before, job, decision)
            elif isinstance(decision, NodeSilent | TrainerSilent):
                self._called_silent(decision, intended)
                if isinstance(decision, NodeSilent):
                    self._node_called_silent(decision, intended, holder=args[0].partition(":")[2])
        self.words.read(intended.cursor)
        for engine in self._job.engines:
            self.engine(engine)

    def _counts(self, decisions: int) -> None:
        """L3: whoever is asked again and again is so with a rest in between."""
        now_s = self._job.kernel.now
        if now_s - self._counted_from_s > ENDLESS_S:
            self._counted_from_s, self._counted = now_s, 0
        self._counted += decisions
        if self._counted > ENDLESS:
            self.broken("L3", f"{self._counted} decisions within {now_s - self._counted_from_s:.1f} s")

    def _called_silent(self, silent: NodeSilent | TrainerSilent, intended: Intended) -> None:
        """L6: nobody is judged by silence before what was said is read."""
        waits_s = self.words.unread_s(intended.cursor, now_s=intended.at_s)
        if waits_s > READ_S:
            self.broken("L6", f"{silent} is decided while facts of {waits_s:.1f} s ago are unread")

    def _node_called_silent(self, silent: NodeSilent, intended: Intended, *, holder: str) -> None:
        """L6: nobody is judged by silence who speaks: not after a stall or an outage of our own either. A
        verdict of before it may be committed after it."""
        pulse = self._job.world.server.pulses[self._keys.pulse].get(agent_source(silent.node))
        spoke_s = pulse.beating_s() if pulse is not None else 0.0
        if spoke_s > SPEAKS_S:
            self.broken("L6", f"node {silent.node} is called silent, and has pulsed for {spoke_s:.1f} s")
        world = self._job.world
        link = next(mind.link for mind in world.minds if mind.name == holder)
        well_s = intended.at_s - max(world.network.well_since, link.well_since if link is not None else 0.0)
        if 0.0 <= well_s < self._job.settings.node_silence_s - GRACE_S:
            self.broken(
                "L6", f"node {silent.node} is called silent {well_s:.1f} s after an outage or a stall"
            )

    def _decided(self, before: CoreJob | None, job: CoreJob, decision: Decision) -> None:
        if decision.id in self._ids:
            self.broken("S10", f"the id {decision.id} is used twice")
        self._ids[decision.id] = self._job.world.generation
        if decision.dry_run:
            return
        match decision:
            case StartEngine():
                engine = self._job.engine(decision.engine)
                self._ask(invariants.of_start(engine.name, decision.incarnation, engine.agent))
                if self._is_known(job, engine) and not _is_repeated(before, decision):
                    self._ask(invariants.of_report("started", engine.name, job.epoch, engine.agent))
            case RouteAdded():
                engine = self._job.engine(decision.engine)
                stood = before.engines.get(engine.name) if before is not None else None
                if stood is not None and stood.route is None:
                    self._ask(invariants.of_route(decision, engine.agent))
                    if asked := self.words.unanswered(engine.name):
                        self.broken("S1", f"{engine.name} is given a route while {asked} is not answered")
                    if self._is_known(job, engine):
                        self._ask(invariants.of_report("routed", engine.name, job.epoch, engine.agent))
            case VerifyEngine():
                self.words.asked(decision)
            case StopEngine():
                self._stopped(before, decision)
            case RecoveryFinished() if decision.recovery is not None:
                if decision.recovery in self._finished:
                    self.broken("L1", f"recovery {decision.recovery} ends twice")
                self._finished.add(decision.recovery)
            case _:
                pass

    def _stopped(self, before: CoreJob | None, stop: StopEngine) -> None:
        """S7: once everything has settled, nobody who serves well is stopped without being asked to."""
        engine = self._job.engine(stop.engine)
        if not self._job.world.settled or before is None:
            return
        state = before.engines.get(stop.engine)
        if state is None:
            return
        wanted = state.then != "restart" or any(each.engine == stop.engine for each in before.meta.rolling)
        here = engine.process(stop.incarnation)
        well = engine.generates(stop.incarnation) and here is not None and here.proven is not None
        if state.phase is Phase.SERVING and well and not wanted:
            self.broken("S7", f"{stop.engine}.{stop.incarnation} is well, and stopped: {stop.reason}")

    def _is_known(self, job: CoreJob, engine: "Engine") -> bool:
        """Whether its node was known before this epoch: of a new one nothing older can be under way."""
        return self._since.get(engine.lives.node, job.epoch) < job.epoch

    # --- what is really there ----------------------------------------------------------------------

    def engine(self, engine: "Engine") -> None:
        """What is committed of an engine against what is there."""
        job = self.job
        if job is None or not self.is_current():
            return
        state = job.engines.get(engine.name)
        if state is None:
            return
        if self._alone and any(each.weights in self._alone for each in engine.agent.processes):
            return
        self._ask(invariants.of_engine(job, state, engine.name, engine.judged()))

    def _stamp(self) -> str:
        server = self._job.world.server
        return f"run-{server.life}:repl-{server.replication}"

    def command(self, engine: "Engine", command: Any) -> None:
        """S8, S12: an agent obeys only what was committed for its job."""
        if command.id not in self._ids:
            self.broken("S8", f"{engine.name} obeys {command.id}, which was never committed")

    def exports(self, trainer: "Trainer", order: Any) -> None:
        """S4: exports begin and end inside the open boundary that their order names."""
        assert trainer.gate is not None
        barrier = trainer.gate.barrier
        opening = barrier.opening
        if not barrier.open or opening is None or order.boundary != barrier.boundary:
            self.broken("S4", f"sync {order.sync} is exported outside its boundary")
        elif order.run != barrier.run or opening.exports != order.version:
            self.broken("S4", f"{order.version} is exported where the boundary exports {opening.exports}")

    def generation(self, order: Any) -> int:
        """The bus that `order` was committed on."""
        return self._ids.get(order.id, -1)

    def alone(self, members: tuple[Member, ...], version: Version) -> None:
        """A push without an orchestrator: routes say the version of before until one is there again."""
        self._alone.add(version)

    def is_excused(self, sampled: "Sampled") -> bool:
        return sampled.version in self._alone


def _is_repeated(before: CoreJob | None, start: StartEngine) -> bool:
    """A start that this epoch has asked for before."""
    if before is None:
        return False
    state = before.engines.get(start.engine)
    intent = state.intent if state is not None else None
    same = isinstance(intent, StartEngine) and intent.incarnation == start.incarnation
    return same and intent is not None and intent.epoch == start.epoch


class Watched:
    """The core's entrances, as the term calls them: each step is judged."""

    def __init__(self, judge: Any) -> None:
        self._judge = judge
        """By the task that runs: whose job it is."""

    def step(self, job: CoreJob, fact: Any, *, now: int, cause: EntryId | None = None) -> Step:
        done = core.step(job, fact, now=now, cause=cause)
        self._judge().stepped(job, fact, done)
        return done

    def tick(self, job: CoreJob, *, now: int) -> Step:
        done = core.tick(job, now=now)
        self._judge().stepped(job, "tick", done)
        return done

    def take_over(self, job: CoreJob, *, now: int, bus: str) -> Step:
        done = core.take_over(job, now=now, bus=bus)
        self._judge().stepped(job, "take over", done)
        return done

    def committed(self, job: CoreJob, *, now: int) -> Step:
        return core.committed(job, now=now)
