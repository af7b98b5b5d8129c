"""Real runs, told to the core again: byte by byte the same decisions and the same state, in any process."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.journals import journal
from tests.journals.journal import Bus, Call, Commit
from tests.journals.replaying import all_journals, replay
from tests.journals.runs import RUNS, stood


def test_every_recorded_run_has_its_journal() -> None:
    assert {path.stem for path in all_journals()} == {run.name for run in RUNS}


@pytest.mark.parametrize("path", all_journals(), ids=lambda path: path.stem)
def test_the_core_decides_again_what_it_decided(path: Path) -> None:
    found = replay(journal.read(path))
    assert not found.differences, "\n".join(found.differences[:5])
    assert found.facts > 10 and found.decisions > 10
    last = found.lines[-1]
    assert isinstance(last, Bus), "what stood on the bus was never compared"
    assert last.count == sum(line.count for line in found.lines if isinstance(line, Commit) and line.stood)


def test_a_journal_is_refused_where_the_bus_tells_another_story() -> None:
    lines = [line for line in journal.read(all_journals()[0]) if not isinstance(line, Bus)]
    texts = [bytes(raw).decode() for line in lines if isinstance(line, Call) for raw in line.decisions]
    with pytest.raises(ValueError, match="does not stand on the bus"):
        stood(lines, [*texts[:3], *texts[4:]])
    with pytest.raises(ValueError, match="are in no commit"):
        stood(lines, [*texts, texts[-1]])


def test_one_byte_of_a_fact_is_noticed() -> None:
    path = all_journals()[0]
    lines = [*journal.read(path)]
    at, call = next(
        (at, line)
        for at, line in enumerate(lines)
        if isinstance(line, Call) and b'"EngineDead"' in bytes(line.fact)
    )
    other = msgspec.Raw(bytes(call.fact).replace(b'"signal":9', b'"signal":11'))
    assert other != call.fact
    lines[at] = msgspec.structs.replace(call, fact=other)
    assert replay(lines).differences


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_the_core_decides_the_same_in_every_process(seed: str) -> None:
    """The order of a set or of a hash is another one in each process."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.journals.replaying"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    here = [f"{path.stem} {replay(journal.read(path)).digest}" for path in all_journals()]
    assert ran.stdout.splitlines() == here
