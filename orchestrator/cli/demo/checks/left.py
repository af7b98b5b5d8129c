"""Checks of the end: everything stopped by itself, and nothing stayed behind."""

from relight.orchestrator.cli.demo.checks.case import Case, Check, Verdict, verdict


def _exits(case: Case) -> Verdict:
    killed = [struck.what for injection in case.evidence.injections for struck in injection.struck]
    wrong: list[str] = []
    for name, codes in case.evidence.exits.items():
        earlier = [-9 for what in killed if what == name]
        if list(codes[:-1]) != earlier or not codes or codes[-1] != 0:
            wrong.append(f"{name}: {list(codes)}")
    told = ", ".join(f"{name} {list(codes)}" for name, codes in case.evidence.exits.items())
    return verdict(wrong if case.evidence.exits else ["no service was seen to end"], told)


def _processes(case: Case) -> Verdict:
    known = case.evidence.looked.processes
    return verdict(
        case.evidence.left.processes if known else ["none was looked for"], f"all {known} are gone"
    )


def _ports(case: Case) -> Verdict:
    known = case.evidence.looked.ports
    wrong = [str(port) for port in case.evidence.left.ports]
    return verdict(wrong if known else ["none was looked for"], f"all {known} are free")


def _segments(case: Case) -> Verdict:
    return verdict(
        case.evidence.left.segments, f"all {case.evidence.looked.segments} under /dev/shm are gone"
    )


def _scratch(case: Case) -> Verdict:
    known = case.evidence.looked.scratch
    return verdict(case.evidence.left.scratch if known else ["none was looked for"], f"all {known} are gone")


CHECKS = (
    Check("every relight process ended cleanly", _exits),
    Check("no process is left", _processes),
    Check("no port is left in use", _ports),
    Check("no shared memory is left", _segments),
    Check("no temporary folder is left", _scratch),
)
