"""One job on one row: what the overview of a whole cluster shows of it. Pure."""

from typing import Any

import msgspec

from relight.events.ids import JobName
from relight.events.values import Phase
from relight.events.version import Version
from relight.orchestrator.annals import PastAlarm
from relight.orchestrator.concerns import Concern
from relight.orchestrator.dashboard.census import Standing
from relight.orchestrator.views import BoundaryView, JobView

CONCERNS_SHOWN = 4

PHASES = tuple(phase.value for phase in Phase)
"""What the letters of a strip mean: `a` is the first one."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One job in short."""

    job: JobName
    error: str | None = None
    """Why it cannot be read; nothing else is known then."""
    epoch: int = 0
    holder: str | None = None
    run: int = 0
    version: Version | None = None
    boundary: BoundaryView | None = None
    trainer_silent: bool = False
    trainer_waits_for: str | None = None
    finished: bool = False
    hold: bool = False
    mode: str = "act"
    floor: int = 0
    serving: int = 0
    routed: int = 0
    engines: int = 0
    strip: str = ""
    """The phase of each engine, in the order of their names, as one letter."""
    recovering: int = 0
    recovered: int = 0
    """Recoveries that are done, as far as the bus remembers."""
    parked: int = 0
    concerns: tuple[Concern, ...] = ()
    """The worst ones."""
    more_concerns: int = 0
    alarms: int = 0
    last_alarm: PastAlarm | None = None


def row(standing: Standing) -> Row:
    """The job in short."""
    seen = standing.view
    if not isinstance(seen, JobView):
        return Row(job=standing.job, error=str(seen))
    annals = standing.annals
    return Row(
        job=seen.job,
        epoch=seen.epoch,
        holder=seen.holder,
        run=seen.run,
        version=seen.version,
        boundary=seen.boundary,
        trainer_silent=seen.trainer_silent,
        trainer_waits_for=seen.trainer_waits_for,
        finished=seen.finished,
        hold=seen.hold,
        mode=seen.mode,
        floor=seen.floor,
        serving=seen.serving,
        routed=sum(engine.route is not None for engine in seen.engines),
        engines=len(seen.engines),
        strip="".join(chr(ord("a") + PHASES.index(engine.phase)) for engine in seen.engines),
        recovering=sum(engine.recovery is not None for engine in seen.engines),
        recovered=annals.outcomes["done"],
        parked=seen.parked,
        concerns=seen.concerns[:CONCERNS_SHOWN],
        more_concerns=max(0, len(seen.concerns) - CONCERNS_SHOWN),
        alarms=sum(annals.alarms.values()),
        last_alarm=annals.alarmed[-1] if annals.alarmed else None,
    )


def lasting(seen: Row) -> Any:
    """The row less what moves with time alone: two that are equal in this show the same."""
    still = tuple(msgspec.structs.replace(concern, for_s=None) for concern in seen.concerns)
    return msgspec.structs.replace(seen, concerns=still)
