"""Time: what is due wakes the loop once, and nothing that waits for something else keeps it awake."""

import pytest

from relight.orchestrator.core.step import tick
from relight.orchestrator.core.timers import next_wake
from tests.scenario import Scenario

UP = ("node a up e0 absent", "e0.1 started", "e0.1 healthy 0.0")
WAITS = {
    "a start on a silent node": ("e0.1 dead", "node a silent", "e0.1 stopped"),
    "a start of a finished job": (
        "trainer 7 open 1 exports=7.0",
        "e0.1 dead",
        "trainer 7 finished",
        "e0.1 stopped",
    ),
    "weights of a finished job": ("trainer 7 open 1 exports=7.0", "trainer 7 finished"),
    "weights after a refusal": (
        "settings recover_at=boundary",
        "trainer 7 open 1 exports=7.0 all",
        "trainer publishes 7.0",
        "e0.1 failed 7.0",
    ),
}


@pytest.mark.parametrize("lines", WAITS.values(), ids=WAITS)
def test_what_waits_for_something_else_than_time_does_not_keep_the_loop_awake(lines: tuple[str, ...]) -> None:
    scenario = Scenario()
    for line in (*UP, *lines, "wait 1000", "wait 1000"):
        scenario.hear(line)
    ticked = scenario.now
    job = tick(scenario.job, now=ticked).job
    due = next_wake(job, ticked=ticked)
    assert due is None or due > ticked


def test_what_came_due_between_two_ticks_still_wakes_the_loop() -> None:
    scenario = Scenario()
    for line in (*UP, "e0.1 dead", "e0.1 stopped", "e0.2 dead", "e0.2 stopped"):
        scenario.hear(line)
    before = scenario.job.engines
    due = next_wake(scenario.job, ticked=scenario.now - 1)
    assert due is not None and due > scenario.now
    assert next_wake(scenario.job, ticked=due - 1) == due
    assert tick(scenario.job, now=due).job.engines != before
