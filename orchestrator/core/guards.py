"""Guards: the questions that decide between two rows of the table. Each reads as its answer does."""

from typing import NamedTuple

from relight.events.facts import (
    AnyFact,
    Healthy,
    NodeUp,
    StartFailed,
    WeightsFailed,
    WeightsLoaded,
)
from relight.events.ids import EngineName
from relight.events.schema import EngineState
from relight.events.values import EngineReport
from relight.events.version import Version
from relight.orchestrator.core import budget, floor, parts
from relight.orchestrator.core.job import Work


class Case(NamedTuple):
    """One fact about one engine, at the moment it is judged."""

    work: Work
    name: EngineName
    fact: AnyFact
    report: EngineReport | None = None
    """What a NodeUp says of the engine."""

    @property
    def engine(self) -> EngineState:
        return self.work.engines[self.name]


def always(case: Case) -> bool:
    return True


def on_the_jobs_version(case: Case) -> bool:
    """What was started or loaded, or is up, is the version that the job is at."""
    version: Version | None
    match case.fact:
        case WeightsLoaded() | Healthy():
            version = case.fact.version
        case NodeUp():
            version = case.report.version if case.report else None
        case _:
            version = case.engine.version
    return version is not None and version == case.work.meta.version


def proven_for_a_route(case: Case) -> bool:
    """The proof that was asked for has come, not one of before, and a route may stand on it."""
    told = case.engine.intent is None and case.work.told(case.engine)
    return told and on_the_jobs_version(case) and not case.work.meta.finished


def loaded(case: Case) -> bool:
    """The load that was asked for is done (not one that was asked for before)."""
    return isinstance(case.fact, WeightsLoaded) and case.engine.version == case.fact.version


def loaded_the_jobs_version(case: Case) -> bool:
    return loaded(case) and on_the_jobs_version(case)


def untouched(case: Case) -> bool:
    return isinstance(case.fact, WeightsFailed) and not case.fact.touched


def may_be_tried_again(case: Case) -> bool:
    """The restart budget has room, and the failure is not one that another try repeats."""
    if isinstance(case.fact, StartFailed) and not case.fact.retryable:
        return False
    given_up = case.engine.retired_because is not None
    return case.engine.then == "restart" and not given_up and budget.left(case.work, case.engine)


def drained(case: Case) -> bool:
    return case.engine.then == "drained"


def on_hold(case: Case) -> bool:
    """Nothing is done to engines: a wish for one that serves waits."""
    return case.work.meta.hold


def is_synced_now(case: Case) -> bool:
    """The open sync has not ended there: its trainer pauses it, and its end tells what became of it."""
    sync = case.work.meta.sync
    return sync is not None and case.name in sync.pending


def leaves_too_few(case: Case) -> bool:
    """The floor asks to wait for an engine that is on its way back."""
    return floor.leaves_too_few(case.work, case.name)


def parts_remain(case: Case) -> bool:
    """Another node of the engine has not proven its part gone."""
    return bool(parts.remaining(case.engine))


def parts_start(case: Case) -> bool:
    """Another node of the engine has not told that its part is up."""
    return case.engine.intent is not None


def awaits_others(case: Case) -> bool:
    """One part alone tells nothing of the whole: the other nodes are to speak, and the head's the last."""
    of_a_part = case.report is not None and case.report.part > 0
    return of_a_part or not all(case.work.reported(part.node) for part in case.engine.parts)


def shows_never_filled(case: Case) -> bool:
    never = case.report is not None and case.report.state == "absent" and case.report.incarnation == 0
    return never and case.engine.incarnation == 0


def shows_gone(case: Case) -> bool:
    """Neither there nor known to be there: the agent recorded no such incarnation, or saw it end. Or one of
    its parts is not up."""
    return _is_gone(case) or (case.work.told(case.engine) and not parts.stand(case.engine))


def _is_gone(case: Case) -> bool:
    report = case.report
    if report is None:
        return False
    return report.state in ("absent", "stopping") or report.incarnation < case.engine.incarnation


def shows_ended(case: Case) -> bool:
    """The very incarnation that is awaited was there and is not any more: what was said of it is lost."""
    report = case.report
    return report is not None and report.state == "absent" and report.incarnation == case.engine.incarnation


def shows_unknown(case: Case) -> bool:
    """Processes live there that nobody watches: the agent has no record of them and cannot make one."""
    return case.report is not None and case.report.state == "unknown"


def shows_live(case: Case) -> bool:
    report = case.report
    live = report is not None and report.state in ("up", "paused", "starting", "unknown")
    return live and not _is_gone(case)


def shows_unwanted(case: Case) -> bool:
    """It is there, and an operator asked for its end meanwhile."""
    return case.engine.then != "restart" and shows_live(case)


def shows_up_on_the_jobs_version(case: Case) -> bool:
    return shows_up(case) and on_the_jobs_version(case)


def shows_up(case: Case) -> bool:
    report = case.report
    return report is not None and report.state in ("up", "paused") and report.address is not None


def shows_drained(case: Case) -> bool:
    return case.report is not None and case.report.state == "drained"


def shows_retired(case: Case) -> bool:
    return case.report is not None and case.report.state == "retired"
