"""Checks of processes: the right one was struck, all old ones are gone, the new ones are others."""

from relight.events.decisions import RouteAdded
from relight.events.facts import EngineStopped
from relight.events.values import Process
from relight.orchestrator.cli.demo.checks.case import Case, Check, Slot, Verdict, verdict
from relight.orchestrator.cli.demo.evidence import Fault

STRIKES: dict[Fault, tuple[tuple[str, int], ...]] = {
    "kill-core": (("core", 9),),
    "kill-server": (("server", 9),),
    "stall": (("core", 19),),
    "kill-agent": (("agent", 9), ("core", 9)),
    "kill-orchestrator": (("orchestrator", 9), ("core", 9)),
}
"""What each fault sends to whom, in order."""


def _struck(case: Case) -> Verdict:
    wrong: list[str] = []
    for injection in case.evidence.injections:
        sent = tuple((struck.what, struck.signal) for struck in injection.struck)
        if sent != STRIKES[case.plan.fault]:
            wrong.append(f"sent {sent}")
    shown = ", ".join(
        f"{struck.what} {struck.process.pid}: signal {struck.signal}" for struck in case.fault.struck
    )
    return verdict(wrong, shown)


def _struck_its_own(case: Case) -> Verdict:
    recorded = _recorded(case, case.dead)
    of_engine = [struck for struck in case.fault.struck if struck.what in ("core", "server")]
    wrong = [f"{struck.what} {struck.process.pid}" for struck in of_engine if struck.process not in recorded]
    return verdict(wrong, f"{len(of_engine)} process of {case.dead}, as its agent recorded it")


def _alive_before(case: Case) -> Verdict:
    look = case.look(case.evidence.before, case.dead)
    alive = set(look.processes) if look else set[Process]()
    missing = _recorded(case, case.dead) - alive
    wrong = [f"pid {process.pid} was not alive" for process in sorted(missing)]
    return verdict(wrong if alive else ["none was seen"], f"{len(alive)} processes alive before the fault")


def _proof_names_all(case: Case) -> Verdict:
    proofs = [fact.proof for _, fact in case.told(EngineStopped, case.dead)]
    named = {process for proof in proofs for process in proof.processes}
    missing = _recorded(case, case.dead) - named
    wrong = [f"pid {process.pid} is not in the proof" for process in sorted(missing)]
    return verdict(wrong if proofs else ["no proof"], f"{len(named)} processes in the proof")


def _proof_of_the_port(case: Case) -> Verdict:
    proofs = [fact.proof for _, fact in case.told(EngineStopped, case.dead)]
    port = _port(case, case.dead)
    right = bool(proofs) and all(proof.port_free and proof.port == port for proof in proofs)
    return Verdict(right, f"port {port} was free again")


def _gone(case: Case) -> Verdict:
    wrong = [f"pid {process.pid} lives" for process in case.evidence.old_alive]
    return verdict(wrong, f"none of {len(_recorded(case, case.dead))} by pid and start time")


def _others(case: Case) -> Verdict:
    old, new = _recorded(case, case.dead), _recorded(case, case.replacement)
    shared = sorted(old & new)
    wrong = [f"pid {process.pid} is in both" for process in shared]
    return verdict(wrong if new else ["none recorded"], f"pids {', '.join(str(p.pid) for p in sorted(new))}")


def _replacement_lives(case: Case) -> Verdict:
    look = case.look(case.evidence.after, case.replacement)
    alive = set(look.processes) if look else set[Process]()
    missing = sorted(_recorded(case, case.replacement) - alive)
    wrong = [f"pid {process.pid} does not live" for process in missing]
    return verdict(wrong if look else ["not seen"], f"{len(alive)} processes alive after the recovery")


def _nobody_before_the_route(case: Case) -> Verdict:
    """All on one machine, so the wall clock of the log and of the decision is the same one."""
    routes = case.told(RouteAdded, case.replacement)
    if not routes:
        return Verdict(False, "it was never routed")
    early = [r for r in case.client_requests(case.replacement) if r.time_ms < routes[0][0].time]
    noted = [r for r in case.evidence.requests if (r.engine, r.incarnation) == case.replacement]
    wrong = [f"{request.path} {routes[0][0].time - request.time_ms} ms before" for request in early]
    return verdict(wrong if noted else ["its log is empty"], f"0 clients in {len(noted)} requests of its log")


def _served_again(case: Case) -> Verdict:
    """The engines' own logs show both calls' second attempts."""
    served = [r for r in case.client_requests(since_ms=case.fault.wall_ms) if r.status == 200]
    return Verdict(len(served) == 2, f"{len(served)} requests answered after the fault")


def _recorded(case: Case, slot: Slot) -> set[Process]:
    started = case.started(slot)
    return set(started.processes) if started else set()


def _port(case: Case, slot: Slot) -> int:
    started = case.started(slot)
    return int(started.address.rpartition(":")[2]) if started else 0


CHECKS = (
    Check("the fault was what was planned", _struck),
    Check("it struck the dead incarnation's own process", _struck_its_own),
    Check("every old process was alive before", _alive_before),
    Check("the proof names every recorded process", _proof_names_all),
    Check("the proof has the port free", _proof_of_the_port),
    Check("every old process is gone", _gone),
    Check("the replacement has processes of its own", _others),
    Check("every process of the replacement is alive", _replacement_lives),
    Check("no client reached it before its route", _nobody_before_the_route),
    Check("both calls were served again", _served_again),
)
