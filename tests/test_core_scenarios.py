"""The core against its transcripts: what is heard, and what is decided."""

from pathlib import Path

import pytest

from relight.events.facts import EngineDead
from relight.events.ids import EngineName, EntryId
from relight.events.values import Cause
from relight.orchestrator.core.step import step
from tests.scenario import SCENARIOS, Scenario, replay

PATHS = sorted(SCENARIOS.glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_core_decides_as_the_scenario_says(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()


def test_there_is_a_scenario_for_each_flow() -> None:
    assert {int(path.stem[:2]) for path in PATHS} >= set(range(1, 13))


def test_a_reason_is_one_line_whatever_log_stands_below_what_the_agent_said() -> None:
    scenario = Scenario()
    for line in ("node a up e0 absent", "e0.1 started", "e0.1 healthy 0.0"):
        scenario.hear(line)
    detail = "GET /health gave nothing\nINFO: one\nINFO: two"
    dead = EngineDead(engine=EngineName("e0"), incarnation=1, cause=Cause.STALL, detail=detail)
    done = step(scenario.job, dead, now=scenario.now, cause=EntryId("9-0"))
    assert {decision.reason for decision in done.decisions} == {"EngineDead: GET /health gave nothing"}
    recovery = done.job.engines[EngineName("e0")].recovery
    assert recovery is not None and recovery.why == "stall (GET /health gave nothing)"
