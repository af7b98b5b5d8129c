"""The whole of one run: a bus, machines, orchestrators, and jobs with their agents, trainers and clients."""

import traceback
from collections import Counter, deque
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from relight.events import codec
from relight.events.bus import scripts
from relight.events.bus.client import Bus
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable, Fenced, Undecodable, leaves
from relight.events.facts import Fact
from relight.events.ids import EngineName, JobName, NodeName, Source
from relight.events.keys import Keys
from relight.events.version import Version
from relight.orchestrator.term import Indigestible
from tests.search.lines import said
from tests.simulate.agent import NodeAgent
from tests.simulate.client import Client, Watched
from tests.simulate.flow import Event, Flow
from tests.simulate.followed import Followed
from tests.simulate.kernel import Kernel, Process
from tests.simulate.link import Link, Network
from tests.simulate.machine import Engine, Machine, Request, Sampled
from tests.simulate.mind import Mind
from tests.simulate.once import Broken
from tests.simulate.plan import Plan
from tests.simulate.rules import Judge
from tests.simulate.server import Fields, Server
from tests.simulate.slot import Slot
from tests.simulate.trainer import Trainer

NODES = ("a", "b", "c", "d")
COMES_BACK_S = 3.0
"""How soon a process that has ended is started again, in the mean."""


class World:
    """Everything that there is."""

    def __init__(self, plan: Plan, *, traced: bool = False) -> None:
        self.plan = plan
        self.random = Random(plan.seed)
        self.kernel = Kernel()
        self.processes: list[Process] = []
        self.flow = Flow(self.kernel, Random(self.random.random()))
        self.server = Server(self.kernel)
        self.network = Network(self.kernel, self.server, Random(self.random.random()))
        self.network.struck = self.count
        self.machines = [Machine(name) for name in NODES[: plan.engines]]
        self.faults: Counter[str] = Counter()
        self.turns: dict[str, Watched] = {}
        """Under way, by their request's name."""
        self.sampled: dict[int, Sampled] = {}
        """Tokens that nobody was given yet."""
        self.tokens = 0
        self.generation = 0
        """Counts what stood in the place of the bus: each time who takes over there trusts nobody."""
        self.rolling_back = False
        self.calm = False
        """No fault happens any more."""
        self.settled = False
        """Everything has settled since: nothing may go wrong any more."""
        self.lines: list[str] | None = [] if traced else None
        self.entries = 0
        self._hash = blake2b(digest_size=8)
        self._serial = 0
        self.jobs = [Job(self, JobName(f"job-{number}")) for number in range(plan.jobs)]
        self._by_key = {key: job for job in self.jobs for key in _keys(job.name)}
        self._streams = {
            key: job for job in self.jobs for key in (Keys(job.name).facts, Keys(job.name).decisions)
        }
        self._judges = {str(job.name): job.judge for job in self.jobs}
        self.minds = [Mind(self, f"mind-{number}") for number in range(plan.minds)]
        self._listen()

    def _listen(self) -> None:
        woken, self.server.ran = self.server.added, self._ran

        def added(stream: str, entry_id: str, fields: Fields) -> None:
            woken(stream, entry_id, fields)
            self._entry(stream, entry_id, fields)

        self.server.added = added

    # --- making things -----------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        process = Process(self.kernel, name, skew_s=self.random.uniform(-1000.0, 1000.0))
        self.processes = [each for each in self.processes if each.alive]
        self.processes.append(process)
        return process

    def link(self, process: Process, *, machine: Machine | None = None) -> Link:
        link = Link(self.network, process)
        link.cut = machine is not None and machine.cut
        return link

    def flight_serial(self) -> int:
        self._serial += 1
        return self._serial

    def start(self) -> None:
        for mind in self.minds:
            mind.start()
        for job in self.jobs:
            job.start()

    def end(self) -> None:
        """Let go of every process."""
        for process in self.processes:
            process.kill()

    def settle_pulses(self) -> None:
        """Some process, link or server begins or ceases to work: whose pulse goes on is looked at."""
        for pulses in self.server.pulses.values():
            for pulse in pulses.values():
                pulse.settle()

    def another_bus(self) -> None:
        """What stood on the bus is gone, wholly or in part."""
        self.generation += 1
        for job in self.jobs:
            job.judge.forget()

    # --- what happens ------------------------------------------------------------------------------

    def sample(self, request: Request, version: Version) -> tuple[int, float]:
        """A token that there never was, sampled by weights of `version`."""
        self.tokens += 1
        logprob = -self.random.random()
        self.sampled[self.tokens] = Sampled(
            request.name, request.made, logprob, version, request.route, self.kernel.now
        )
        return self.tokens, logprob

    def asked(self, request: str, token_ids: list[int], params: dict[str, Any]) -> None:
        turn = self.turns.get(request.rpartition("-")[0])
        if turn is not None:
            turn.asked(token_ids, params)

    def _ran(self, script: str, keys: list[str], args: list[str], reply: Any) -> None:
        """A script was executed."""
        judge = self._by_key[keys[0]].judge
        if any(self._by_key.get(key) is not self._by_key[keys[0]] for key in keys):
            judge.broken("S12", f"one script touches {keys}")
        if script == scripts.COMMIT and reply[0] == "OK":
            judge.committed(keys, args)
        else:
            judge.ran(script, args, reply)
            if script == scripts.APPEND and len(args) > 3:
                self._by_key[keys[0]].spoke(keys, args)

    def _entry(self, stream: str, entry_id: str, fields: Fields) -> None:
        self.entries += 1
        self._hash.update(f"{self.kernel.events} {stream} {entry_id} {fields.get('data')}".encode())
        job = self._streams.get(stream)
        if job is not None and stream.endswith(":facts"):
            job.judge.words.appended(entry_id, now_s=self.kernel.now)
        if self.lines is not None and job is not None:
            self._trace(stream, entry_id, fields)

    def _trace(self, stream: str, entry_id: str, fields: Fields) -> None:
        entry = codec.entry(entry_id, fields)
        try:
            message = codec.decode_fact(entry) if codec.is_fact(entry) else codec.decode_decision(entry)
            text = said(message)
        except (Undecodable, TypeError):
            text = f"{entry.type} {entry.data[:120]}"
        arrow = "F" if stream.endswith(":facts") else "D"
        self.line(self._streams[stream].name, f"{arrow} {entry.source:<14} {text}")

    def note(self, who: str, what: str) -> None:
        """Something happened beside the bus."""
        self._hash.update(f"{self.kernel.events} {who} {what}".encode())
        self.line(who, what)

    def line(self, who: str, what: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.kernel.now:10.3f}  {who:<8} {what}")

    def count(self, kind: str) -> None:
        self.faults[kind] += 1

    def followed(self, bus: JobBus) -> Followed:
        """The follower of the client whose code runs."""
        clients = [client for job in self.jobs for client in job.clients]
        client = next(each for each in clients if each.process is self.kernel.process)
        return Followed(bus, client.job.judge, client.hears)

    def judge(self) -> Judge:
        """That of the job whose task runs."""
        assert self.kernel.task is not None
        return self._judges[self.kernel.task.tag]

    def broke(self, error: BaseException) -> None:
        """A process ended by an error that none of ours may end by."""
        leaf = leaves(error)[0]
        leaf = leaf.__cause__ if isinstance(leaf, Indigestible) and leaf.__cause__ is not None else leaf
        frame = traceback.extract_tb(leaf.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        self.kernel.halt(Broken("crash", f"{type(leaf).__name__}: {leaf} ({where})"))

    def digest(self) -> str:
        self._hash.update(f"{self.kernel.events} {self.kernel.now}".encode())
        return self._hash.hexdigest()


def _keys(job: JobName) -> tuple[str, ...]:
    keys = Keys(job)
    return (
        *(keys.facts, keys.decisions, keys.state, keys.pulse, keys.seen),
        *(keys.lease, keys.epoch, keys.run, keys.parked),
    )


class Job:
    """One job's part of the world."""

    def __init__(self, world: World, name: JobName) -> None:
        self.world = world
        self.name = name
        self.plan = world.plan
        self.settings = world.plan.settings
        self.kernel = world.kernel
        self.random = Random(f"{world.plan.seed} {name}")
        self.judge = Judge(self)
        self.armed: Counter[str] = Counter()
        """Faults that happen at the next occasion."""
        self.turns = 0
        self.failed_turns = 0
        self.turned = Event(self.kernel)
        self.finishing = False
        self.engines = [
            Engine(
                self,
                machine,
                Slot(name, NodeName(machine.name), EngineName(f"e{number}"), literal=self.plan.literal),
            )
            for number, machine in enumerate(world.machines)
        ]
        self._by_name = {engine.name: engine for engine in self.engines}
        self.agents = [NodeAgent(self, engine) for engine in self.engines]
        self.trainer = Trainer(self)
        self.clients = [Client(self, f"c{number}") for number in range(self.plan.clients)]
        self._people = world.process(f"people-{name}")
        self._words: deque[tuple[Fact, Source]] = deque()

    def engine(self, name: EngineName) -> Engine:
        return self._by_name[name]

    def start(self) -> None:
        for agent in self.agents:
            agent.start()
        for client in self.clients:
            client.start()
        self.kernel.after(self.random.uniform(0.0, 20.0), self.trainer.start)

    def note(self, who: str, what: str) -> None:
        self.world.note(f"{self.name}", f"·  {who} {what}")

    def count(self, kind: str) -> None:
        self.world.count(kind)

    def says(self, fact: Fact, source: Source) -> None:
        """A person or a stranger says something, after all that was said before, trying until it is said."""
        self._words.append((fact, source))
        if len(self._words) == 1:
            self._people.spawn(self._tells())

    async def _tells(self) -> None:
        bus = Bus("redis://bus", Link(self.world.network, self._people).connect).job(self.name)
        while self._words:
            fact, source = self._words[0]
            try:
                await bus.hint(fact, source=source)
            except BusUnavailable:
                await self.world.flow.sleep(1.0)
                continue
            self._words.popleft()

    # --- occasions ---------------------------------------------------------------------------------

    def fails(self, kind: str) -> bool:
        """Whether this occasion is one of the faults that are armed."""
        if not self.armed[kind]:
            return False
        self.armed[kind] -= 1
        self.count(kind)
        self.note("!", kind)
        return True

    def finishes(self, trainer: Trainer) -> bool:
        if self.finishing:
            self.finishing = False
            self.count("finish")
            return True
        return False

    # --- ends of processes -------------------------------------------------------------------------

    def comes_back(self, start: Any) -> None:
        self.kernel.after(self.random.uniform(0.5, 1.5) * COMES_BACK_S, start)

    def agent_failed(self, agent: NodeAgent, error: BaseException) -> None:
        """A bus that was rolled back behind several lives of it fences an agent; it is started again."""
        if not (isinstance(leaves(error)[0], Fenced) and self.world.generation):
            self.world.broke(error)
        self.note("agent", f"{agent.engine.lives.node} is fenced")
        agent.crash(disk=True)
        self.comes_back(agent.start)

    def spoke(self, keys: list[str], args: list[str]) -> None:
        """Facts of a source were appended."""
        if args[0] == self.trainer.source:
            self.trainer.last_words = keys, args
        for agent in self.agents:
            if agent.source == args[0] and agent.boot == args[1]:
                agent.last_words = keys, args

    def trainer_ended(self) -> None:
        self.comes_back(self.trainer.start)

    def turn_ended(self, error: BaseException | None) -> None:
        self.turns += 1
        self.failed_turns += error is not None
        turned, self.turned = self.turned, Event(self.kernel)
        turned.set()
