"""What goes wrong with engines."""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulate.faults.injector import Fault, Injector


def _death(injector: "Injector") -> bool:
    job, agent = injector.an_agent()
    here = agent.engine.process(agent.engine.agent.incarnation)
    if here is None or not here.alive:
        return False
    injector.happened("death", job, f"{agent.engine.name}.{here.incarnation}")
    agent.engine.put(agent.engine.lives.dies(agent.engine.agent))
    agent.noticed_soon()
    return True


def _hang(injector: "Injector", kind: str) -> bool:
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


def _arm(injector: "Injector", kind: str) -> bool:
    """At the next occasion, which counts it."""
    job = injector.a_job()
    if job.armed[kind]:
        return False
    job.armed[kind] = 1
    return True


def _pause(injector: "Injector") -> bool:
    job, agent = injector.an_agent()
    engine = agent.engine
    here = engine.process(engine.agent.incarnation)
    if here is None or not agent.up or not agent.is_serving() or not engine.generates(here.incarnation):
        return False
    engine.paused = here.incarnation
    injector.world.kernel.after(2.0, agent.pause_seen, here.incarnation)
    return injector.happened("pause", job, f"{engine.name}.{here.incarnation}")


OF_ENGINES: dict[str, "Fault"] = {
    "death": _death,
    "hang": partial(_hang, kind="hang"),
    "stall": partial(_hang, kind="stall"),
    **{
        kind: partial(_arm, kind=kind)
        for kind in ("start-fails", "stop-fails", "load-refused", "load-fails", "canary", "export-fails")
    },
    "pause": _pause,
}
