"""What goes wrong, and when: each kind of fault as one function that says whether it has happened.

A fault that lasts ends by itself, and all of them end when the fault-free tail begins.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from relight.agents.replay.stream import Interrupted
from relight.agents.replay.turn import End
from relight.events.bus import scripts
from relight.events.facts import (
    DrainRequested,
    Fact,
    HoldRequested,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
    RouteSuspected,
)
from relight.events.ids import Source
from tests.simulate.kernel import Process
from tests.simulate.link import Link
from tests.simulate.machine import Machine

if TYPE_CHECKING:
    from tests.simulate.agent import NodeAgent
    from tests.simulate.mind import Mind
    from tests.simulate.world import Job, World

OPERATOR = Source("operator/sim")
LONG_S = 5.0
"""A break that nobody can overlook."""
TRIES = 5
"""Occasions looked for before a moment passes without a fault."""


class Injector:
    """Draws faults from the plan's kinds until the tail begins."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.random = Random(world.plan.seed * 2 + 2)
        self._ends: list[Callable[[], object]] = []
        """What is to be undone when the tail begins."""

    def start(self) -> None:
        self.world.kernel.after(self._pause_s(), self._strike)

    def _pause_s(self) -> float:
        return self.random.expovariate(1.0 / self.world.plan.every_s)

    def _strike(self) -> None:
        if self.world.calm:
            return
        self.world.kernel.after(self._pause_s(), self._strike)
        for _ in range(TRIES):
            kind = self.random.choice(self.world.plan.kinds)
            if _FAULTS[kind](self):
                return

    def cease(self) -> None:
        """The tail begins: whatever lasts ends now."""
        self.world.calm = True
        for end in self._ends:
            end()
        for job in self.world.jobs:
            job.armed.clear()
            job.finishing = False
        for mind in self.world.minds:
            if mind.link is not None:
                mind.link.before = mind.link.behind = mind.link.delays = mind.link.deaf_to = None

    # --- how faults are made -----------------------------------------------------------------------

    def happened(self, kind: str, job: "Job | None", what: str) -> bool:
        self.world.count(kind)
        self.world.note(job.name if job is not None else "world", f"!  {kind} {what}")
        return True

    def last(self, seconds: float, end: Callable[[], object]) -> None:
        """Have `end` called after so long, or when the tail begins; once."""
        over: list[None] = []

        def once() -> None:
            if not over:
                over.append(None)
                end()

        self._ends.append(once)
        self.world.kernel.after(seconds, once)

    def a_job(self) -> "Job":
        return self.random.choice(self.world.jobs)

    def an_agent(self) -> "tuple[Job, NodeAgent]":
        job = self.a_job()
        return job, self.random.choice(job.agents)

    def a_mind(self) -> "Mind":
        return self.random.choice(self.world.minds)

    def freeze(self, process: Process | None, seconds: float) -> bool:
        if process is None or not process.alive or process.frozen:
            return False
        process.freeze()
        self.world.settle_pulses()

        def thaw() -> None:
            if process.alive:
                process.thaw()
                self._well_again(process, seconds)
            self.world.settle_pulses()

        self.last(seconds, thaw)
        return True

    def _well_again(self, process: Process, seconds: float) -> None:
        if seconds >= LONG_S:
            for link in self.world.network.links:
                if link.process is process:
                    link.well_since = self.world.kernel.now

    def cut(self, link: Link | None, seconds: float) -> bool:
        """No packet of that link comes through."""
        if link is None or link.cut or not link.process.alive:
            return False
        network = self.world.network
        link.cut = True
        self.world.settle_pulses()
        self.world.kernel.after(self.random.uniform(0.5, 2.5), network.reset, link)

        def heal() -> None:
            link.cut = False
            self._well_again(link.process, seconds)
            self.world.settle_pulses()

        self.last(seconds, heal)
        return True


# --- engines ---------------------------------------------------------------------------------------


def _death(injector: Injector) -> bool:
    job, agent = injector.an_agent()
    here = agent.engine.process(agent.engine.agent.incarnation)
    if here is None or not here.alive:
        return False
    injector.happened("death", job, f"{agent.engine.name}.{here.incarnation}")
    agent.engine.put(agent.engine.lives.dies(agent.engine.agent))
    agent.noticed_soon()
    return True


def _hang(injector: Injector, kind: str) -> bool:
    job, agent = injector.an_agent()
    engine = agent.engine
    here = engine.process(engine.agent.incarnation)
    if here is None or not here.alive or engine.hung == here.incarnation:
        return False
    engine.hung = here.incarnation
    agent.watch()
    if kind == "stall":
        injector.last(injector.random.uniform(1.0, 15.0), partial(_goes_on, engine, here.incarnation))
    return injector.happened(kind, job, f"{engine.name}.{here.incarnation}")


def _goes_on(engine: Any, incarnation: int) -> None:
    if engine.hung == incarnation:
        engine.hung = 0
        engine.put(engine.agent)


def _arm(injector: Injector, kind: str) -> bool:
    """At the next occasion, which counts it."""
    job = injector.a_job()
    if job.armed[kind]:
        return False
    job.armed[kind] = 1
    return True


def _pause(injector: Injector) -> bool:
    job, agent = injector.an_agent()
    engine = agent.engine
    here = engine.process(engine.agent.incarnation)
    if here is None or not agent.up or not agent.is_serving() or not engine.generates(here.incarnation):
        return False
    engine.paused = here.incarnation
    injector.world.kernel.after(2.0, agent.pause_seen, here.incarnation)
    return injector.happened("pause", job, f"{engine.name}.{here.incarnation}")


# --- agents and nodes ------------------------------------------------------------------------------


def _agent_dies(injector: Injector, kind: str) -> bool:
    job, agent = injector.an_agent()
    if not agent.up:
        return False
    if kind == "agent-half" and not agent.dies_half_way():
        return False
    injector.happened(kind, job, f"{agent.engine.lives.node}")
    agent.crash(disk=kind != "agent-lost")
    job.comes_back(agent.start)
    return True


def _agent_ghost(injector: Injector) -> bool:
    job, agent = injector.an_agent()
    if agent.ghost is None or not injector.world.network.up:
        return False
    keys, args = agent.ghost
    injector.happened("agent-ghost", job, f"{agent.source} as {args[1]}")
    injector.world.server.eval(scripts.APPEND, keys, [args[0], args[1], "0", *args[3:]])
    return True


def _agent_frozen(injector: Injector) -> bool:
    job, agent = injector.an_agent()
    frozen = injector.freeze(agent.process, injector.random.uniform(1.0, 25.0))
    return frozen and injector.happened("agent-frozen", job, agent.engine.lives.node)


def _node_cut(injector: Injector) -> bool:
    machine: Machine = injector.random.choice(injector.world.machines)
    if machine.cut:
        return False
    machine.cut = True
    seconds = injector.random.uniform(2.0, 40.0)
    for job in injector.world.jobs:
        for agent in job.agents:
            if agent.engine.machine is machine:
                injector.cut(agent.link, seconds)
    injector.last(seconds, partial(_node_back, injector.world, machine))
    return injector.happened("node-cut", None, f"{machine.name} for {seconds:.1f} s")


def _node_back(world: "World", machine: Machine) -> None:
    machine.cut = False
    for job in world.jobs:
        for agent in job.agents:
            if agent.engine.machine is machine:
                if agent.link is not None:
                    agent.link.cut = False
                agent.engine.flush()
    world.settle_pulses()


# --- orchestrators ---------------------------------------------------------------------------------


def _mind_dies(injector: Injector, kind: str) -> bool:
    mind = injector.a_mind()
    if mind.process is None or mind.link is None:
        return False
    if kind == "mind-crash":
        _kill_mind(injector, mind, kind)
        return True
    if mind.link.before is not None or mind.link.behind is not None:
        return False

    def at_commit(script: str) -> None:
        if script == scripts.COMMIT:
            _kill_mind(injector, mind, kind)

    if kind == "mind-before":
        mind.link.before = at_commit
    else:
        mind.link.behind = at_commit
    return True


def _kill_mind(injector: Injector, mind: "Mind", kind: str) -> None:
    if mind.process is None:
        return  # another one of its commits was under way when it died
    injector.happened(kind, None, mind.name)
    mind.crash()
    world = injector.world
    world.kernel.after(injector.random.uniform(0.5, 6.0), mind.start)


def _mind_frozen(injector: Injector) -> bool:
    mind, seconds = injector.a_mind(), injector.random.uniform(0.5, 12.0)
    if not injector.freeze(mind.process, seconds):
        return False
    return injector.happened("mind-frozen", None, f"{mind.name} for {seconds:.1f} s")


def _mind_late(injector: Injector) -> bool:
    """The next commit travels for longer than its lease lasts; its sender stands still meanwhile."""
    mind = injector.a_mind()
    if mind.link is None or mind.process is None or mind.link.delays is not None or mind.process.frozen:
        return False
    process = mind.process

    def delays(script: str) -> float:
        if script != scripts.COMMIT or process.frozen:
            return 0.0
        seconds = injector.random.uniform(2.0, 6.0)
        mind_link.delays = None
        injector.freeze(process, seconds + 0.5)
        injector.happened("mind-late", None, f"{mind.name} for {seconds:.1f} s")
        return seconds

    mind_link = mind.link
    mind_link.delays = delays
    return True


def _mind_cut(injector: Injector) -> bool:
    mind, seconds = injector.a_mind(), injector.random.uniform(0.5, 10.0)
    if not injector.cut(mind.link, seconds):
        return False
    return injector.happened("mind-cut", None, f"{mind.name} for {seconds:.1f} s")


def _hand_over(injector: Injector) -> bool:
    mind, job = injector.a_mind(), injector.a_job()
    return mind.hand_over(job) and injector.happened("hand-over", job, f"by {mind.name}")


# --- trainers --------------------------------------------------------------------------------------


def _trainer_dies(injector: Injector) -> bool:
    job = injector.a_job()
    if not job.trainer.up:
        return False
    injector.happened("trainer-crash", job, "")
    job.trainer.crash()
    return True


def _trainer_ghost(injector: Injector) -> bool:
    job = injector.a_job()
    if job.trainer.ghost is None or not injector.world.network.up:
        return False
    keys, args = job.trainer.ghost
    injector.happened("trainer-ghost", job, args[0])
    later = list(args)
    at = 3
    while at < len(later):  # under numbers that were not used yet
        later[at] = str(int(later[at]) + 1_000_000)
        at += 2 + int(later[at + 1])
    injector.world.server.eval(scripts.APPEND, keys, later)
    job.trainer.ghost = None
    return True


def _trainer_frozen(injector: Injector) -> bool:
    job, seconds = injector.a_job(), injector.random.uniform(2.0, 60.0)
    frozen = injector.freeze(job.trainer.process, seconds)
    return frozen and injector.happened("trainer-frozen", job, f"for {seconds:.1f} s")


def _trainer_cut(injector: Injector) -> bool:
    job, seconds = injector.a_job(), injector.random.uniform(2.0, 60.0)
    cut = injector.cut(job.trainer.link, seconds)
    return cut and injector.happened("trainer-cut", job, f"for {seconds:.1f} s")


def _export_cut(injector: Injector) -> bool:
    job = injector.a_job()
    return job.trainer.cut_off() and injector.happened("export-cut", job, "")


def _finish(injector: Injector) -> bool:
    job = injector.a_job()
    if job.finishing or not job.trainer.up:
        return False
    job.finishing = True
    return True


# --- the bus ---------------------------------------------------------------------------------------


def _bus_away(injector: Injector) -> bool:
    network = injector.world.network
    if not network.up:
        return False
    network.up = False
    network.reset()
    injector.world.settle_pulses()

    def back() -> None:
        network.up = True
        if seconds >= LONG_S:
            network.well_since = injector.world.kernel.now
        injector.world.settle_pulses()

    seconds = injector.random.choice([0.3, 2.0, 5.0, 20.0]) * injector.random.uniform(0.5, 1.5)
    injector.last(seconds, back)
    return injector.happened("bus-away", None, f"for {seconds:.1f} s")


def _bus_restart(injector: Injector) -> bool:
    if not _bus_away(injector):
        return False
    injector.world.faults["bus-away"] -= 1
    injector.world.server.restart()
    injector.world.generation += 1
    return injector.happened("bus-restart", None, "")


def _bus_rollback(injector: Injector) -> bool:
    world = injector.world
    if world.rolling_back or not world.network.up:
        return False
    world.rolling_back = True
    data = world.server.data.copy()
    world.kernel.after(injector.random.choice([0.05, 0.5, 2.0, 10.0]), _fails_over, injector, data)
    return True


def _fails_over(injector: Injector, data: Any) -> None:
    world = injector.world
    world.rolling_back = False
    if world.calm:
        return
    world.another_bus()
    world.server.replace(data, clock_ms=injector.random.uniform(-20.0, 20.0))
    world.network.reset()
    injector.happened("bus-rollback", None, "")


def _bus_emptied(injector: Injector) -> bool:
    world = injector.world
    world.server.empty()
    world.another_bus()
    world.network.disturb()
    return injector.happened("bus-emptied", None, "")


def _weather(injector: Injector, kind: str) -> bool:
    """Commands of one process, or of all, go wrong for a while; each that does counts itself."""
    world = injector.world
    links = [link for link in world.network.links if link.process.alive and link.weather.calm]
    if not links:
        return False
    minds = [mind.link for mind in world.minds if mind.link is not None and mind.process is not None]
    if kind == "lost-reply" and minds and injector.random.random() < 0.5:
        injector.random.choice(minds).deaf_to = scripts.COMMIT
        return True
    weather = injector.random.choice(links).weather
    if kind == "doubled" or (injector.random.random() < 0.2 and world.network.weather.calm):
        weather = world.network.weather
    setattr(weather, kind.replace("-", "_"), injector.random.uniform(0.1, 0.6))
    weather.calm = False
    injector.last(injector.random.uniform(2.0, 20.0), weather.still)
    return True


# --- clients and operators -------------------------------------------------------------------------


def _suspicion(injector: Injector) -> bool:
    job = injector.a_job()
    engine = injector.random.choice(job.engines)
    incarnation = engine.agent.incarnation
    injector.happened("suspicion", job, f"{engine.name}.{incarnation}")
    suspected = RouteSuspected(engine=engine.name, incarnation=incarnation, error="it looked at me strangely")
    job.says(suspected, Source("client/x"))
    return True


def _stream_cut(injector: Injector) -> bool:
    job = injector.a_job()
    engine = injector.random.choice(job.engines)
    if not engine.requests or engine.machine.cut:
        return False
    request = injector.random.choice(list(engine.requests.values()))
    del engine.requests[request.name]
    request.flight.broken(Interrupted(End.RESET, "reset by peer"))
    return injector.happened("stream-cut", job, request.name)


def _client_dies(injector: Injector) -> bool:
    job = injector.a_job()
    if not job.clients:
        return False
    client = injector.random.choice(job.clients)
    if client.process is None:
        return False
    injector.happened("client-crash", job, client.name)
    client.crash()
    job.comes_back(client.start)
    return True


def _client_cut(injector: Injector) -> bool:
    job, seconds = injector.a_job(), injector.random.uniform(2.0, 40.0)
    if not job.clients:
        return False
    client = injector.random.choice(job.clients)
    cut = injector.cut(client.link, seconds)
    return cut and injector.happened("client-cut", job, f"{client.name} for {seconds:.1f} s")


def _operator(injector: Injector, kind: str) -> bool:
    job = injector.a_job()
    engine = injector.random.choice(job.engines)
    wish: Fact
    match kind:
        case "restart":
            wish = RestartRequested(engine=engine.name)
        case "restart-all":
            wish = RestartRequested()
        case "drain":
            wish = DrainRequested(engine=engine.name)
        case "retire":
            wish = RetireRequested(engine=engine.name)
        case _:
            wish = HoldRequested()
    job.says(wish, OPERATOR)
    if kind in ("drain", "retire", "hold"):
        release = ReleaseRequested(engine=None if kind == "hold" else engine.name)
        injector.last(injector.random.uniform(5.0, 60.0), partial(job.says, release, OPERATOR))
    return injector.happened(kind, job, engine.name)


_FAULTS: dict[str, Callable[[Injector], bool]] = {
    "death": _death,
    "hang": partial(_hang, kind="hang"),
    "stall": partial(_hang, kind="stall"),
    **{
        kind: partial(_arm, kind=kind)
        for kind in ("start-fails", "stop-fails", "load-refused", "load-fails", "canary", "export-fails")
    },
    "pause": _pause,
    **{kind: partial(_agent_dies, kind=kind) for kind in ("agent-crash", "agent-lost", "agent-half")},
    "agent-ghost": _agent_ghost,
    "agent-frozen": _agent_frozen,
    "node-cut": _node_cut,
    **{kind: partial(_mind_dies, kind=kind) for kind in ("mind-crash", "mind-before", "mind-after")},
    "mind-frozen": _mind_frozen,
    "mind-late": _mind_late,
    "mind-cut": _mind_cut,
    "hand-over": _hand_over,
    "trainer-crash": _trainer_dies,
    "trainer-ghost": _trainer_ghost,
    "trainer-frozen": _trainer_frozen,
    "trainer-cut": _trainer_cut,
    "export-cut": _export_cut,
    "finish": _finish,
    "bus-away": _bus_away,
    "bus-restart": _bus_restart,
    "bus-rollback": _bus_rollback,
    "bus-emptied": _bus_emptied,
    **{kind: partial(_weather, kind=kind) for kind in ("lost-request", "lost-reply", "slow", "doubled")},
    "suspicion": _suspicion,
    "stream-cut": _stream_cut,
    "client-crash": _client_dies,
    "client-cut": _client_cut,
    **{kind: partial(_operator, kind=kind) for kind in ("restart", "restart-all", "drain", "retire", "hold")},
}
"""By kind: what makes it happen, and says whether it did."""
