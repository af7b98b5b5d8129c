"""What goes wrong with agents and nodes."""

from functools import partial
from typing import TYPE_CHECKING

from relight.events.bus import scripts

if TYPE_CHECKING:
    from tests.simulate.faults.injector import Fault, Injector
    from tests.simulate.machine import Machine
    from tests.simulate.world import World


def _agent_dies(injector: "Injector", kind: str) -> bool:
    job, agent = injector.an_agent()
    if not agent.up:
        return False
    if kind == "agent-half" and not agent.dies_half_way():
        return False
    injector.happened(kind, job, f"{agent.engine.lives.node}")
    agent.crash(disk=kind != "agent-lost")
    job.comes_back(agent.start)
    return True


def _agent_ghost(injector: "Injector") -> bool:
    job, agent = injector.an_agent()
    if agent.ghost is None or not injector.world.network.up:
        return False
    keys, args = agent.ghost
    injector.happened("agent-ghost", job, f"{agent.source} as {args[1]}")
    injector.world.server.eval(scripts.APPEND, keys, [args[0], args[1], "0", *args[3:]])
    return True


def _agent_frozen(injector: "Injector") -> bool:
    job, agent = injector.an_agent()
    frozen = injector.freeze(agent.process, injector.random.uniform(1.0, 25.0))
    return frozen and injector.happened("agent-frozen", job, agent.engine.lives.node)


def _node_cut(injector: "Injector") -> bool:
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


def _node_back(world: "World", machine: "Machine") -> None:
    machine.cut = False
    for job in world.jobs:
        for agent in job.agents:
            if agent.engine.machine is machine:
                if agent.link is not None:
                    agent.link.cut = False
                agent.engine.flush()
    world.settle_pulses()


OF_NODES: dict[str, "Fault"] = {
    **{kind: partial(_agent_dies, kind=kind) for kind in ("agent-crash", "agent-lost", "agent-half")},
    "agent-ghost": _agent_ghost,
    "agent-frozen": _agent_frozen,
    "node-cut": _node_cut,
}
