"""The table of an engine's life: every pair of phase and fact, and the picture of it in the docs."""

from pathlib import Path

import pytest

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
from relight.orchestrator.core.diagram import mermaid
from relight.orchestrator.core.enter import _ENTER
from relight.orchestrator.core.guards import always
from relight.orchestrator.core.table import NEXT

FACTS = (
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

IMPOSSIBLE = {
    # Nothing of an engine that was never filled can speak.
    *((Phase.NEW, fact) for fact in (EngineDead, EngineStarted, EngineStopped, StartFailed, StopFailed)),
    *((Phase.NEW, fact) for fact in (Healthy, PauseExpired, WeightsFailed, WeightsLoaded)),
    # An engine that is not up yet holds no weights that could load, fail or be healthy.
    *((Phase.STARTING, fact) for fact in (Healthy, PauseExpired, WeightsFailed, WeightsLoaded)),
    # The incarnation was never asked to stop or start in these phases.
    *((phase, StopFailed) for phase in (Phase.STARTING, Phase.STALE, Phase.SYNCING)),
    *((phase, StopFailed) for phase in (Phase.VERIFYING, Phase.SERVING)),
    *((phase, StartFailed) for phase in (Phase.STALE, Phase.SYNCING, Phase.VERIFYING)),
    *((phase, StartFailed) for phase in (Phase.SERVING, Phase.DRAINING)),
}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("fact", FACTS)
def test_every_pair_is_written_or_known_to_be_impossible(phase: Phase, fact: type) -> None:
    assert ((phase, fact) in NEXT) != ((phase, fact) in IMPOSSIBLE)


@pytest.mark.parametrize("pair", NEXT, ids=lambda pair: f"{pair[0]}-{pair[1].__name__}")
def test_every_row_ends_in_a_guard_that_holds(pair: tuple[Phase, type]) -> None:
    assert list(NEXT[pair])[-1] is always


def test_every_phase_has_its_decisions() -> None:
    assert set(_ENTER) == set(Phase)


def test_only_a_proof_and_the_trainers_version_lead_to_serving() -> None:
    leads = {
        pair for pair, rows in NEXT.items() if Phase.SERVING in rows.values() and pair[0] is not Phase.SERVING
    }
    assert leads == {(Phase.VERIFYING, Healthy)}


def test_only_proof_leads_out_of_stopping() -> None:
    leads = {
        pair[1]
        for pair, rows in NEXT.items()
        if pair[0] is Phase.STOPPING and set(rows.values()) != {Phase.STOPPING}
    }
    assert leads == {EngineStopped, StartFailed}


def test_the_picture_in_the_docs_is_the_tables() -> None:
    page = Path(__file__).parent.parent / "docs" / "engine-life.md"
    assert mermaid() in page.read_text()
