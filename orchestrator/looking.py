"""Looking at jobs from outside: what stands on the bus, as views. Nothing is written."""

from collections.abc import Sequence

from relight.events.bus.client import Bus
from relight.events.bus.survey import Glance
from relight.events.errors import BusUnavailable, Undecodable
from relight.events.ids import JobName
from relight.events.schema import Snapshot
from relight.orchestrator.concerns import Seen
from relight.orchestrator.views import JobView, job_view

Unread = BusUnavailable | Undecodable
"""Why one job cannot be shown."""


async def at_jobs(bus: Bus, jobs: Sequence[JobName]) -> list[JobView | Unread]:
    """Each job as it is now. Raises BusUnavailable where the server cannot serve at all."""
    survey, stamp = bus.survey(), await bus.stamp()
    glances, states = await survey.glance(jobs), await survey.states(jobs)
    now_ms = bus.clock.now_ms()
    return [
        view(job, glance, state, now_ms=now_ms, stamp=stamp)
        for job, glance, state in zip(jobs, glances, states, strict=True)
    ]


def view(
    job: JobName, glance: Glance | BusUnavailable, state: Snapshot | Unread, *, now_ms: int, stamp: str
) -> JobView | Unread:
    """The job as `state` and `glance` have it."""
    if isinstance(glance, BusUnavailable):
        return glance
    if not isinstance(state, Snapshot):
        return state
    seen = Seen(
        now_ms=now_ms,
        holder=glance.holder,
        lease_left_s=glance.lease_left_s,
        parked=glance.parked,
        behind=glance.behind,
        stamp=stamp,
    )
    return job_view(job, state, seen)
