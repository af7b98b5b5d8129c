"""A node agent's process: the real follower, outbox and publisher around the model of its slot.

The slot is `tests.search`'s model of `agents/node`, record by record; what it does takes time here. The rest
mirrors `agents.node.agent.Agent` line by line: the highest epoch is kept before a decision of it is obeyed,
lower ones are answered with NodeUp, a state that was read anew is recalled, reported and then obeyed.
The disk is what outlives the process: the records (in `Engine.agent`), the boot, and the outbox.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from relight.agents.adapters.vllm import Counters
from relight.agents.node.agent import is_called_silent
from relight.agents.node.probe import REPLY_S
from relight.agents.node.vigil import Verdict, Vigil
from relight.agents.outbox import MemoryOutbox, Publisher
from relight.events import codec
from relight.events.bus.client import Bus
from relight.events.bus.follow import Decided, Follower, Noted, Synced
from relight.events.decisions import (
    LoadWeights,
    ProbeEngine,
    ReportRequested,
    RouteAdded,
    StartEngine,
    StopEngine,
    SyncWeights,
    VerifyEngine,
)
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.facts import (
    EngineDead,
    Fact,
    NodeSilent,
    PauseExpired,
    WeightsFailed,
    WeightsLoaded,
)
from relight.events.ids import BootId, agent_source
from relight.events.schema import Snapshot
from relight.events.values import Cause
from tests.search.agent import Agent
from tests.simulate.flow import Event, Scope
from tests.simulate.followed import Followed
from tests.simulate.kernel import Process
from tests.simulate.link import Link, Pulse
from tests.simulate.machine import Engine

if TYPE_CHECKING:
    from tests.simulate.world import Job

STALL_S = 10.0
TICK_S = 1.0


class NodeAgent:
    """The agent of one engine's node, over all of its lives."""

    def __init__(self, job: "Job", engine: Engine) -> None:
        self.job = job
        self.engine = engine
        self.source = agent_source(engine.lives.node)
        self.boot = BootId(f"boot-{engine.lives.node}")
        self.outbox = MemoryOutbox()
        self.ghost: tuple[list[str], list[str]] | None = None
        """The last words under an earlier boot: keys and arguments of the script."""
        self.last_words: tuple[list[str], list[str]] | None = None
        self.lives = 0
        self.process: Process | None = None
        self.link: Link | None = None
        self.pulse: Pulse | None = None
        self._publisher: Publisher | None = None
        self._interrupted = Event(job.kernel)
        self._wake = Event(job.kernel)
        self._proves = False
        self._looks: Any = None
        """The probe or proof under way."""
        self._leased_until = 0.0
        """Virtual time until which a trainer may pause it and write into it."""

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.alive

    # --- lives -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life: adopt what an earlier one left, then work."""
        world = self.job.world
        self.lives += 1
        name = f"agent-{self.job.name}-{self.engine.lives.node}-{self.lives}"
        process = self.process = world.process(name)
        process.failed = lambda error: self.job.agent_failed(self, error)
        link = self.link = world.link(process, machine=self.engine.machine)
        self._interrupted, self._wake = Event(self.job.kernel), Event(self.job.kernel)
        self._looks = None
        process.spawn(self._live(link))

    def crash(self, *, disk: bool) -> None:
        """End it as SIGKILL does, with or without what it keeps on disk."""
        if self.process is None:
            return
        self.process.kill()
        if self.pulse is not None:
            self.pulse.settle()
        self.process = None
        self.engine.put(self.engine.lives.crash(self.engine.agent, disk=disk))
        if not disk:
            self.ghost, self.last_words = self.last_words, None
            self.outbox = MemoryOutbox()
            self.boot = BootId(f"boot-{self.engine.lives.node}-{self.lives}")

    async def _live(self, link: Link) -> None:
        assert self.process is not None
        job = Bus("redis://bus", link.connect).job(self.job.name)
        self._publisher = Publisher(job, self.outbox, source=self.source, boot=self.boot)
        seq = int(self.job.kernel.now * 1000) + self.lives
        self.pulse = link.pulse(job.keys.pulse, self.source, self.boot, seq)
        self._did(self.engine.lives.adopt(self.engine.agent._replace(up=True)))
        self.process.spawn(self._publisher.run(install=True))
        self.process.spawn(self._work())
        await self._follow(Followed(job, self.job.judge), job.bus)

    def say(self, fact: Fact) -> None:
        assert self._publisher is not None
        self._publisher.say(fact)

    def _did(self, did: tuple[Agent, tuple[Fact, ...]]) -> None:
        agent, said = did
        if not agent.paused and any(isinstance(fact, WeightsLoaded) for fact in said):
            self.engine.paused = 0  # the load has resumed it
        self.engine.put(agent)
        for fact in said:
            self.say(fact)

    # --- decisions ---------------------------------------------------------------------------------

    async def _follow(self, follower: Follower, bus: Bus) -> None:
        while True:
            match await follower.next():
                case Synced(snapshot=snapshot, why=why):
                    self._synced(snapshot, why)
                    if why != "gap":
                        await self._enrol(bus)
                case Decided(decision=decision):
                    self._decided(decision)
                case Noted(entry=entry):
                    try:
                        fact = codec.decode_fact(entry)
                    except Undecodable:
                        continue
                    if isinstance(fact, NodeSilent) and fact.node == self.engine.lives.node:
                        self.say(self.engine.lives.report(self.engine.agent))
                case _:
                    pass

    async def _enrol(self, bus: Bus) -> None:
        with suppress(BusUnavailable):
            await bus.enrol(self.job.name)

    def _raise_epoch(self, epoch: int) -> None:
        agent = self.engine.agent
        if epoch > agent.epoch:
            self.engine.put(agent._replace(epoch=epoch, obeyed=max(agent.obeyed, epoch)))

    def _synced(self, snapshot: Snapshot, why: str) -> None:
        lives, name = self.engine.lives, self.engine.name
        self._raise_epoch(snapshot.epoch)
        state = snapshot.engines.get(name)
        if why != "gap" and state is not None and state.node == lives.node:
            self.engine.put(lives.recall(self.engine.agent, state))
        if why != "gap" or is_called_silent(snapshot, lives.node):
            self.say(lives.report(self.engine.agent))
        if state is not None and state.intent is not None and state.intent.epoch >= snapshot.epoch:
            self._decided(state.intent)

    def _decided(self, decision: Any) -> None:
        lives, agent = self.engine.lives, self.engine.agent
        if decision.dry_run:
            return
        if decision.epoch < agent.epoch:
            self.say(lives.report(agent))
            return
        self._raise_epoch(decision.epoch)
        if (
            isinstance(decision, LoadWeights | VerifyEngine | RouteAdded)
            and decision.engine == self.engine.name
        ):
            self._leased_until = 0.0
        match decision:
            case StartEngine() | StopEngine() if decision.node != lives.node:
                return
            case StartEngine() | StopEngine() | ProbeEngine() | LoadWeights() | VerifyEngine():
                if decision.engine == self.engine.name:
                    self._obey(decision)
            case ReportRequested(node=node) if node == lives.node:
                self.say(lives.report(self.engine.agent, decision.id))
            case SyncWeights():
                if any(member.engine == self.engine.name for member in decision.members):
                    self._leased_until = self.job.kernel.now + self._until(decision.deadline)
            case _:
                pass

    def _obey(self, command: Any) -> None:
        self.job.judge.command(self.engine, command)
        if command == self._looks:
            return
        before = self.engine.agent
        after = self.engine.lives.obey(before, command)
        self.engine.put(after)
        if isinstance(command, StopEngine) and not isinstance(before.running, StopEngine):
            self._interrupt()
        self._wake.set()

    def _interrupt(self) -> None:
        self._interrupted.set()
        self._interrupted = Event(self.job.kernel)

    # --- operations --------------------------------------------------------------------------------

    async def _work(self) -> None:
        """One operation at a time, as `slot.Slot.run`."""
        engine = self.engine
        if engine.agent.takes_up:
            await self._spend(self.job.plan.stop_s if engine.agent.phase == "stopping" else 0.05)
            if engine.agent.takes_up:
                self._did(engine.lives.take_up(engine.agent))
        while True:
            while engine.agent.running is not None or engine.agent.pending:
                await self._operate()
            self._wake = Event(self.job.kernel)
            await self._wake.wait()

    async def _operate(self) -> None:
        engine, lives = self.engine, self.engine.lives
        if engine.agent.running is None:
            command = engine.agent.pending[0]
            if isinstance(command, ProbeEngine | VerifyEngine) and self._is_up(command.incarnation):
                await self._look(command)
                return
            if refused := self._refuses():
                self._did(refused)
                return
            self._did(lives.begin(engine.agent))
            return
        order = engine.agent.running
        if await self._spend(self._duration(order)):
            return
        if engine.agent.running is not order:
            return
        self._did(self._outcome(order))

    def _is_up(self, incarnation: int) -> bool:
        agent = self.engine.agent
        return agent.phase == "up" and not agent.dead and agent.incarnation == incarnation

    async def _look(self, command: Any) -> None:
        """A probe or a proof: it takes time, and what is true at its end counts."""
        engine, lives = self.engine, self.engine.lives
        hangs = engine.hung == command.incarnation
        engine.put(engine.agent._replace(pending=engine.agent.pending[1:]))
        if hangs and isinstance(command, ProbeEngine):
            return  # its watch goes on
        seconds = self._until(command.deadline) if hangs else self._looks_for(command)
        self._looks, self._proves = command, isinstance(command, VerifyEngine)
        interrupted = await self._spend(seconds)
        self._looks, self._proves = None, False
        if interrupted or not self._is_up(command.incarnation):
            return
        engine.put(engine.agent._replace(pending=(command, *engine.agent.pending)))
        spoilt = isinstance(command, VerifyEngine) and (hangs or self.job.fails("canary"))
        if spoilt and (refused := lives.refuse(engine.agent)):
            self._unproven(refused)
            return
        proven = lives.begin(engine.agent)
        if any(isinstance(fact, WeightsFailed) for fact in proven[1]):
            self._unproven(proven)
            return
        if isinstance(command, VerifyEngine):
            engine.paused = 0
        self._did(proven)

    def _looks_for(self, command: Any) -> float:
        """How long it takes: now and then, where the engine is busy, as long as the agent waits."""
        seconds = self.job.random.uniform(0.02, 0.5)
        if seconds < 0.4 or not isinstance(command, ProbeEngine):
            return seconds
        left = self._until(command.deadline)
        return max(left - REPLY_S, left / 2.0)

    def _unproven(self, did: tuple[Agent, tuple[Fact, ...]]) -> None:
        """It is paused again, and what ran is aborted."""
        self.engine.abort_all(did[0].incarnation)
        self._did(did)

    def _refuses(self) -> tuple[Agent, tuple[Fact, ...]] | None:
        agent = self.engine.agent
        if isinstance(agent.pending[0], LoadWeights) and self.job.fails("load-refused"):
            return self.engine.lives.refuse(agent)
        return None

    def _duration(self, order: Any) -> float:
        plan, random = self.job.plan, self.job.random
        hangs = self.engine.hung == self.engine.agent.incarnation
        match order:
            case StartEngine():
                return self._until(order.deadline) if hangs else random.uniform(0.5, 1.5) * plan.start_s
            case StopEngine(drain_s=drain_s):
                drains = min(drain_s, 2.0) if self.engine.requests else 0.0
                return drains + random.uniform(0.5, 1.5) * plan.stop_s
            case _:
                return self._until(order.deadline) if hangs else random.uniform(0.5, 1.5) * plan.load_s

    def _outcome(self, order: Any) -> tuple[Agent, tuple[Fact, ...]]:
        lives, agent = self.engine.lives, self.engine.agent
        kind = {StartEngine: "start-fails", StopEngine: "stop-fails"}.get(type(order), "load-fails")
        late = self._until(order.deadline) <= 0.0 and not isinstance(order, StopEngine)
        if late or self.job.fails(kind):
            return lives.fail(agent)[0]
        return lives.finish(agent)

    def _until(self, deadline: int) -> float:
        return max(0.0, (deadline - self.job.world.server.now_ms()) / 1000.0)

    async def _spend(self, seconds: float) -> bool:
        """Let an operation take its time; whether it was interrupted."""
        with Scope(self.job.kernel, delay=seconds) as scope:
            await self._interrupted.wait()
        return not scope.cancelled_caught

    # --- deaths ------------------------------------------------------------------------------------

    def noticed_soon(self) -> None:
        """A process has ended: the kernel tells a living agent."""
        if self.process is not None and self.process.alive:
            self.process.spawn(self._notice())

    async def _notice(self) -> None:
        engine, lives = self.engine, self.engine.lives
        await self.job.world.flow.sleep(self.job.random.uniform(0.0005, 0.01))
        here = lives.process(engine.agent)
        if engine.agent.phase == "starting" and isinstance(engine.agent.running, StartEngine):
            if here is None or not here.alive:
                self._did(lives.finish(engine.agent))
                self._interrupt()
        elif lives.unnoticed(engine.agent):
            self._did(lives.notice(engine.agent))
            self._interrupt()

    def watch(self) -> None:
        """Its engine's core stands still: a living agent's watch goes on asking."""
        if self.process is not None and self.process.alive:
            self.process.spawn(self._watch())

    async def _watch(self) -> None:
        """`stall.Watchman.run`, for as long as there is something to be seen."""
        engine, kernel = self.engine, self.job.kernel
        hung = engine.hung
        vigil: Vigil | None = None
        while engine.hung == hung and self._is_up(hung):
            await self.job.world.flow.sleep(TICK_S)
            excused = engine.agent.running is not None or self._proves or kernel.now < self._leased_until
            if excused or not self._is_up(hung):
                vigil = None
                continue
            vigil = vigil or Vigil(stall_s=STALL_S, now=kernel.now)
            if engine.hung != hung:
                return
            vigil.told(kernel.now, Counters(running=1, waiting=0, tokens=0))
            if vigil.verdict(kernel.now) is Verdict.STALLED:
                self._stalled()
                return

    def _stalled(self) -> None:
        engine = self.engine
        said = EngineDead(
            engine=engine.name,
            incarnation=engine.agent.incarnation,
            cause=Cause.STALL,
            detail="no answer from its core and no progress",
            detect_ms=STALL_S * 1000.0,
        )
        self._did((engine.agent._replace(dead=True), (said,)))
        self._interrupt()

    def is_serving(self) -> bool:
        """Up and not paused, as far as it knows."""
        return self._is_up(self.engine.agent.incarnation) and not self.engine.agent.paused

    def pause_seen(self, incarnation: int) -> None:
        """`stall.Watchman._note_paused`, once the core has answered twice."""
        here = self.engine.process(incarnation)
        if self.process is None or not self.process.ready(self.pause_seen, incarnation):
            return
        seen = self.engine.paused == incarnation and here is not None and here.alive
        if seen and self.job.kernel.now < self._leased_until:
            self.job.kernel.after(TICK_S, self.pause_seen, incarnation)
        elif seen and self._is_up(incarnation) and self.is_serving():
            self.say(PauseExpired(engine=self.engine.name, incarnation=incarnation))

    def dies_half_way(self) -> bool:
        """End between what it writes down and what it says, where an operation runs."""
        agent = self.engine.agent
        if agent.running is None or agent.takes_up:
            return False
        after, said = self.engine.lives.finish_half(agent)
        for fact in said:
            self.outbox.put(fact)
        self.engine.put(after)
        return True
