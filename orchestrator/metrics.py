"""What a cluster's monitoring is told of the jobs on a bus, from one table. Pure.

A name ends in its unit. Labels are bounded: jobs, and fixed sets of phases, outcomes and kinds; engines,
nodes and versions are none of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

from relight.events import exposition
from relight.events.exposition import Family, Values
from relight.events.ids import JobName
from relight.events.values import Phase
from relight.orchestrator.annals import PHASES, Annals
from relight.orchestrator.concerns import Level
from relight.orchestrator.views import JobView

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Upper bounds of phases: from a fence to the cold start of a large model."""

OUTCOMES = ("done", "retired", "cancelled", "superseded")


class Told(NamedTuple):
    """One job at one moment."""

    view: JobView
    annals: Annals


class Page(NamedTuple):
    """The process that tells."""

    reached: bool
    """Whether the bus serves."""
    unread: int
    """Jobs that cannot be read."""
    browsers: int
    followed: int
    """Jobs whose streams are followed for them."""


Read = Callable[[Told], Mapping[tuple[str, ...], Values]]
"""Samples of one job, by the labels behind `job`."""


class Metric(NamedTuple):
    """One metric of each job."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    """Behind `job`."""
    read: Read
    bounds: tuple[float, ...] = ()


def _one(read: Callable[[JobView], float]) -> Read:
    return lambda told: {(): read(told.view)}


def _engines(told: Told) -> Mapping[tuple[str, ...], Values]:
    counted = Counter(engine.phase for engine in told.view.engines)
    return {(phase.value,): counted[phase.value] for phase in Phase}


def _concerns(told: Told) -> Mapping[tuple[str, ...], Values]:
    counted = Counter(concern.level for concern in told.view.concerns)
    return {(level,): counted[level] for level in get_args(Level)}


def _outcomes(told: Told) -> Mapping[tuple[str, ...], Values]:
    return {(outcome,): told.annals.outcomes[outcome] for outcome in OUTCOMES}


def _phases(told: Told) -> Mapping[tuple[str, ...], Values]:
    return {(phase,): told.annals.took.get(phase, Counter[float]()) for phase in PHASES}


def _alarms(told: Told) -> Mapping[tuple[str, ...], Values]:
    return {(kind,): count for kind, count in told.annals.alarms.items()}


METRICS: tuple[Metric, ...] = (
    Metric("relight_engines", "gauge", "Engines by phase.", ("phase",), _engines),
    Metric(
        "relight_routed_engines",
        "gauge",
        "Engines that clients may call.",
        (),
        _one(lambda view: sum(engine.route is not None for engine in view.engines)),
    ),
    Metric("relight_floor_engines", "gauge", "Engines that shall serve.", (), _one(lambda view: view.floor)),
    Metric(
        "relight_recoveries_running",
        "gauge",
        "Recoveries under way.",
        (),
        _one(lambda view: sum(engine.recovery is not None for engine in view.engines)),
    ),
    Metric(
        "relight_recoveries_total",
        "counter",
        "Recoveries that ended, by outcome.",
        ("outcome",),
        _outcomes,
    ),
    Metric(
        "relight_recovery_phase_seconds",
        "histogram",
        "How long the phases of recoveries took that brought a route back, and the total.",
        ("phase",),
        _phases,
        SECONDS,
    ),
    Metric(
        "relight_alarms_total",
        "counter",
        "Alarms by kind.",
        ("kind",),
        _alarms,
    ),
    Metric(
        "relight_concerns",
        "gauge",
        "What a person should look at, by level: alarm, look, note.",
        ("level",),
        _concerns,
    ),
    Metric("relight_parked_entries", "gauge", "Undecodable entries.", (), _one(lambda view: view.parked)),
    Metric("relight_epoch", "gauge", "The term that committed last.", (), _one(lambda view: view.epoch)),
    Metric(
        "relight_held",
        "gauge",
        "Whether an orchestrator holds the job.",
        (),
        _one(lambda view: view.holder is not None),
    ),
    Metric(
        "relight_facts_behind",
        "gauge",
        "Facts behind the committed cursor, counted to 1000.",
        (),
        _one(lambda view: view.behind),
    ),
    Metric("relight_nodes", "gauge", "Nodes that have reported.", (), _one(lambda view: len(view.nodes))),
    Metric(
        "relight_silent_nodes",
        "gauge",
        "Nodes that have fallen silent.",
        (),
        _one(lambda view: len(view.silent_nodes)),
    ),
    Metric(
        "relight_trainer_silent",
        "gauge",
        "Whether the trainer has fallen silent.",
        (),
        _one(lambda view: view.trainer_silent),
    ),
    Metric("relight_job_finished", "gauge", "Whether it has ended.", (), _one(lambda view: view.finished)),
    Metric("relight_on_hold", "gauge", "Whether an operator holds it.", (), _one(lambda view: view.hold)),
)
"""Every metric of a job."""

OF_PAGE: tuple[tuple[str, str, Callable[[Page], int]], ...] = (
    ("relight_bus_up", "Whether the bus serves.", lambda page: int(page.reached)),
    ("relight_unread_jobs", "Jobs whose state cannot be read.", lambda page: page.unread),
    ("relight_dashboard_browsers", "Live pages that are open.", lambda page: page.browsers),
    (
        "relight_dashboard_followed_jobs",
        "Jobs whose streams are followed for them.",
        lambda page: page.followed,
    ),
)
"""Gauges of the process that tells: name, help, and how it is read."""


def text(jobs: Mapping[JobName, Told], page: Page) -> str:
    """All of them."""
    of_page = [Family(name, "gauge", told, (), {(): read(page)}) for name, told, read in OF_PAGE]
    return exposition.text([*of_page, *(_family(metric, jobs) for metric in METRICS)])


def _family(metric: Metric, jobs: Mapping[JobName, Told]) -> Family:
    samples = {
        (str(job), *labels): _plain(value)
        for job, told in jobs.items()
        for labels, value in metric.read(told).items()
    }
    return Family(metric.name, metric.kind, metric.help, ("job", *metric.labels), samples, metric.bounds)


def _plain(value: Values) -> Values:
    return int(value) if isinstance(value, bool) else value


def names() -> list[str]:
    """Every metric's name, in the order of the text."""
    return [name for name, _, _ in OF_PAGE] + [metric.name for metric in METRICS]
