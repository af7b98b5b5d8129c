"""The core against its transcripts: what is heard, and what is decided."""

from pathlib import Path

import pytest

from tests.scenario import SCENARIOS, replay

PATHS = sorted(SCENARIOS.glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_core_decides_as_the_scenario_says(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()


def test_there_is_a_scenario_for_each_flow() -> None:
    assert {int(path.stem[:2]) for path in PATHS} >= set(range(1, 13))
