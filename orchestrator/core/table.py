"""The life of an engine as a table: `(phase, type of fact) -> {guard: next phase}`.

Guards are asked in order. A pair that is written with the phase it is in changes nothing: the fact is
late, doubled or only informs. A pair that is absent cannot come from an agent that keeps the protocol:
it is counted and alarmed.
"""

from collections.abc import Callable, Mapping

from relight.events.facts import (
    DrainRequested,
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    NodeSilent,
    NodeUp,
    PauseExpired,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
    RouteSuspected,
    StartFailed,
    StopFailed,
    WeightsFailed,
    WeightsLoaded,
)
from relight.events.values import Phase
from relight.orchestrator.core.guards import (
    Case,
    always,
    awaits_others,
    drained,
    is_synced_now,
    leaves_too_few,
    loaded,
    loaded_the_jobs_version,
    may_be_tried_again,
    on_hold,
    on_the_jobs_version,
    parts_remain,
    parts_start,
    proven_for_a_route,
    shows_drained,
    shows_ended,
    shows_gone,
    shows_live,
    shows_never_filled,
    shows_retired,
    shows_unknown,
    shows_unwanted,
    shows_up,
    shows_up_on_the_jobs_version,
    untouched,
)

Guard = Callable[[Case], bool]
Rows = Mapping[Guard, Phase]
Table = Mapping[tuple[Phase, type], Rows]

ALIVE = (Phase.STARTING, Phase.STALE, Phase.SYNCING, Phase.VERIFYING, Phase.SERVING)
ENDED = (Phase.BACKOFF, Phase.STOPPED, Phase.RETIRED)

_OVER: Rows = {
    shows_drained: Phase.STOPPED,
    shows_retired: Phase.RETIRED,
    shows_gone: Phase.STOPPING,
    shows_unwanted: Phase.STOPPING,
}
_STANDS: Rows = {
    shows_up_on_the_jobs_version: Phase.VERIFYING,
    shows_up: Phase.STALE,
    shows_live: Phase.STOPPING,
    always: Phase.SILENT,
}
_RETURN: Rows = {**_OVER, awaits_others: Phase.SILENT, **_STANDS}
_WHOLE: Rows = {**_OVER, **_STANDS}
_WAITS: Rows = {on_hold: Phase.SERVING, leaves_too_few: Phase.SERVING}


def _nodes() -> Table:
    rows: dict[tuple[Phase, type], Rows] = {
        (Phase.NEW, NodeUp): {awaits_others: Phase.NEW, shows_never_filled: Phase.STARTING, **_WHOLE},
        (Phase.SILENT, NodeUp): _RETURN,
        (Phase.DRAINING, NodeSilent): {always: Phase.SILENT},
        (Phase.STARTING, NodeSilent): {always: Phase.STARTING},
        (Phase.SILENT, NodeSilent): {always: Phase.SILENT},
        (Phase.NEW, NodeSilent): {always: Phase.NEW},
        (Phase.STOPPING, NodeSilent): {always: Phase.STOPPING},
        (Phase.STOPPING, NodeUp): {always: Phase.STOPPING},
        (Phase.STARTING, NodeUp): {shows_ended: Phase.STOPPING, always: Phase.STARTING},
        (Phase.BACKOFF, NodeUp): {shows_live: Phase.STOPPING, always: Phase.BACKOFF},
        (Phase.STOPPED, NodeUp): {shows_live: Phase.STOPPING, always: Phase.STOPPED},
        (Phase.RETIRED, NodeUp): {shows_live: Phase.STOPPING, always: Phase.RETIRED},
        (Phase.DRAINING, NodeUp): {shows_drained: Phase.STOPPED, always: Phase.DRAINING},
    }
    for phase in (Phase.STALE, Phase.SYNCING, Phase.VERIFYING, Phase.SERVING):
        rows[phase, NodeUp] = {
            shows_drained: Phase.STOPPED,
            shows_retired: Phase.RETIRED,
            shows_gone: Phase.STOPPING,
            shows_unknown: Phase.STOPPING,
            always: phase,
        }
        rows[phase, NodeSilent] = {always: Phase.SILENT}
    for phase in ENDED:
        rows[phase, NodeSilent] = {always: phase}
    return rows


def _deaths() -> Table:
    rows: dict[tuple[Phase, type], Rows] = {
        (phase, kind): {always: Phase.STOPPING} for phase in ALIVE for kind in (EngineDead, RestartRequested)
    }
    rows[Phase.SERVING, RestartRequested] = {on_hold: Phase.SERVING, always: Phase.STOPPING}
    rows[Phase.DRAINING, EngineDead] = {always: Phase.STOPPING}
    rows[Phase.SILENT, EngineDead] = {always: Phase.STOPPING}
    for phase in (Phase.STOPPING, *ENDED):
        rows[phase, EngineDead] = {always: phase}
    for phase in (Phase.DRAINING, Phase.STOPPING, Phase.SILENT, Phase.NEW, *ENDED):
        rows[phase, RestartRequested] = {always: phase}
    return rows


def _stops_and_starts() -> Table:
    rows: dict[tuple[Phase, type], Rows] = {
        (Phase.STOPPING, EngineStopped): {
            parts_remain: Phase.STOPPING,
            may_be_tried_again: Phase.BACKOFF,
            drained: Phase.STOPPED,
            always: Phase.RETIRED,
        },
        (Phase.DRAINING, EngineStopped): {parts_remain: Phase.DRAINING, always: Phase.STOPPED},
        (Phase.STOPPING, StopFailed): {always: Phase.STOPPING},
        (Phase.DRAINING, StopFailed): {always: Phase.DRAINING},
        (Phase.STARTING, EngineStarted): {
            parts_start: Phase.STARTING,
            on_the_jobs_version: Phase.VERIFYING,
            always: Phase.STALE,
        },
        (Phase.STARTING, StartFailed): {
            parts_remain: Phase.STOPPING,
            may_be_tried_again: Phase.BACKOFF,
            always: Phase.RETIRED,
        },
        (Phase.STOPPING, StartFailed): {
            parts_remain: Phase.STOPPING,
            may_be_tried_again: Phase.BACKOFF,
            drained: Phase.STOPPED,
            always: Phase.RETIRED,
        },
    }
    for phase in ALIVE:  # an agent that ends and takes its engines with it
        rows[phase, EngineStopped] = {always: Phase.STOPPING}
    for phase in (*ENDED, Phase.SILENT):
        rows[phase, EngineStopped] = {always: phase}
        rows[phase, StopFailed] = {always: phase}
        rows[phase, StartFailed] = {always: phase}
    for phase in Phase:
        if phase not in (Phase.NEW, Phase.STARTING):
            rows[phase, EngineStarted] = {always: phase}
    return rows


def _weights() -> Table:
    rows: dict[tuple[Phase, type], Rows] = {
        (Phase.SYNCING, WeightsLoaded): {
            loaded_the_jobs_version: Phase.VERIFYING,
            loaded: Phase.STALE,
            always: Phase.SYNCING,
        },
        (Phase.SYNCING, WeightsFailed): {untouched: Phase.STALE, always: Phase.STOPPING},
        (Phase.SERVING, WeightsLoaded): {always: Phase.SERVING},
        (Phase.SERVING, WeightsFailed): {untouched: Phase.STALE, always: Phase.STOPPING},
        (Phase.VERIFYING, WeightsFailed): {always: Phase.STOPPING},
        (Phase.VERIFYING, Healthy): {proven_for_a_route: Phase.SERVING, always: Phase.VERIFYING},
        (Phase.SERVING, Healthy): {always: Phase.SERVING},
        (Phase.SERVING, PauseExpired): {is_synced_now: Phase.SERVING, always: Phase.STALE},
    }
    for phase in Phase:
        for kind in (WeightsLoaded, WeightsFailed, Healthy, PauseExpired):
            if phase not in (Phase.NEW, Phase.STARTING):
                rows.setdefault((phase, kind), {always: phase})
        rows[phase, RouteSuspected] = {always: phase}
    return rows


def _operators() -> Table:
    rows: dict[tuple[Phase, type], Rows] = {
        (Phase.SERVING, DrainRequested): {**_WAITS, always: Phase.DRAINING},
        (Phase.SERVING, RetireRequested): {**_WAITS, always: Phase.STOPPING},
        (Phase.DRAINING, DrainRequested): {always: Phase.DRAINING},
        (Phase.DRAINING, RetireRequested): {always: Phase.STOPPING},
        (Phase.DRAINING, ReleaseRequested): {always: Phase.STOPPING},
        (Phase.BACKOFF, DrainRequested): {always: Phase.STOPPED},
        (Phase.BACKOFF, RetireRequested): {always: Phase.RETIRED},
        (Phase.STOPPED, DrainRequested): {always: Phase.STOPPED},
        (Phase.STOPPED, RetireRequested): {always: Phase.RETIRED},
        (Phase.STOPPED, ReleaseRequested): {always: Phase.STARTING},
        (Phase.RETIRED, ReleaseRequested): {always: Phase.STARTING},
        (Phase.RETIRED, RetireRequested): {always: Phase.RETIRED},
        (Phase.RETIRED, DrainRequested): {always: Phase.RETIRED},
        (Phase.NEW, DrainRequested): {always: Phase.STOPPED},
        (Phase.NEW, RetireRequested): {always: Phase.RETIRED},
    }
    for phase in (Phase.STARTING, Phase.STALE, Phase.SYNCING, Phase.VERIFYING, Phase.STOPPING, Phase.SILENT):
        stopping = Phase.SILENT if phase is Phase.SILENT else Phase.STOPPING
        rows[phase, DrainRequested] = {always: stopping}
        rows[phase, RetireRequested] = {always: stopping}
    for phase in (*ALIVE, Phase.STOPPING, Phase.SILENT, Phase.BACKOFF, Phase.NEW):
        rows[phase, ReleaseRequested] = {always: phase}
    return rows


NEXT: Table = {**_nodes(), **_deaths(), **_stops_and_starts(), **_weights(), **_operators()}
