"""What clients and operators do."""

from functools import partial
from typing import TYPE_CHECKING

from relight.agents.replay.stream import Interrupted
from relight.agents.replay.turn import End
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
from tests.simulate.faults.injector import OPERATOR

if TYPE_CHECKING:
    from tests.simulate.faults.injector import Fault, Injector

BURST = 150
"""Hints in one burst: more than is kept of read ones."""


def _suspicion(injector: "Injector") -> bool:
    job = injector.a_job()
    engine = injector.random.choice(job.engines)
    incarnation = engine.agent.incarnation
    injector.happened("suspicion", job, f"{engine.name}.{incarnation}")
    suspected = RouteSuspected(engine=engine.name, incarnation=incarnation, error="it looked at me strangely")
    job.says(suspected, Source("client/x"))
    return True


def _burst(injector: "Injector") -> bool:
    job = injector.a_job()
    engine = injector.random.choice(job.engines)
    suspected = RouteSuspected(
        engine=engine.name, incarnation=engine.agent.incarnation, error="it looks at me strangely"
    )
    for _ in range(BURST):
        job.says(suspected, Source("client/x"))
    return injector.happened("burst", job, f"{engine.name}.{suspected.incarnation}")


def _stream_cut(injector: "Injector") -> bool:
    job = injector.a_job()
    engine = injector.random.choice(job.engines)
    if not engine.requests or engine.machine.cut:
        return False
    request = injector.random.choice(list(engine.requests.values()))
    del engine.requests[request.name]
    request.flight.broken(Interrupted(End.RESET, "reset by peer"))
    return injector.happened("stream-cut", job, request.name)


def _client_dies(injector: "Injector") -> bool:
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


def _client_cut(injector: "Injector") -> bool:
    job, seconds = injector.a_job(), injector.random.uniform(2.0, 40.0)
    if not job.clients:
        return False
    client = injector.random.choice(job.clients)
    cut = injector.cut(client.link, seconds)
    return cut and injector.happened("client-cut", job, f"{client.name} for {seconds:.1f} s")


def _operator(injector: "Injector", kind: str) -> bool:
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


OF_PEOPLE: dict[str, "Fault"] = {
    "suspicion": _suspicion,
    "burst": _burst,
    "stream-cut": _stream_cut,
    "client-crash": _client_dies,
    "client-cut": _client_cut,
    **{kind: partial(_operator, kind=kind) for kind in ("restart", "restart-all", "drain", "retire", "hold")},
}
