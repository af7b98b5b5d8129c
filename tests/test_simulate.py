"""The simulation, in its short form: no rule breaks, a seed is one history, a lost safeguard is found out."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relight.events.bus import scripts
from relight.orchestrator import term
from tests.simulate.plan import KINDS, Plan, swarm
from tests.simulate.run import first_broken, run

SEEDS = range(14)
"""Of `make simulate`, which goes on."""

CALM = Plan(seed=1, kinds=("suspicion",), every_s=1e9, faults_s=60.0)


def test_no_rule_breaks_and_every_tail_settles() -> None:
    broken = first_broken(SEEDS)
    assert broken is None, (
        f"seed {broken.seed}: {broken.broken}; python -m tests.simulate --seed {broken.seed} --trace"
    )


def test_without_faults_everybody_serves_and_turns_end() -> None:
    result = run(CALM)
    assert result.broken is None
    assert result.turns > 10
    assert not result.faults


def test_a_seed_is_one_history_whatever_hashes_are() -> None:
    here = run(swarm(7)).digest
    assert run(swarm(7)).digest == here
    assert run(swarm(8)).digest != here
    code = "from tests.simulate.run import run_seed; print(run_seed(7).digest)"
    for hashes in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert told.stdout.strip() == here


def test_a_trace_says_who_said_and_decided_what_and_when() -> None:
    lines = run(CALM, traced=True).lines
    assert any("F agent/a" in line and "e0.1 started" in line for line in lines)
    assert any("D orchestrator/mind-" in line and "route e0.1" in line for line in lines)
    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)


def test_every_kind_of_fault_can_be_drawn() -> None:
    assert set(KINDS) == {kind for seed in range(60) for kind in swarm(seed).kinds}


# --- a safeguard that is taken away is missed --------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "safeguard", "without", "seeds"),
    [
        ("COMMIT", "if redis.call('GET', KEYS[1]) ~= ARGV[1] or", "if false and", range(40)),
        ("TAKE", "if held then", "if false then", range(4)),
        ("RELEASE", "redis.call('GET', KEYS[1]) ~= ARGV[1]", "false", range(12)),
    ],
)
def test_a_script_without_its_safeguard_is_found_out(
    script: str, safeguard: str, without: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    text: str = getattr(scripts, script)
    assert safeguard in text
    monkeypatch.setattr(scripts, script, text.replace(safeguard, without))
    assert first_broken(seeds) is not None


def test_a_term_that_goes_back_to_an_older_cursor_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = term.Term._commit

    async def forgets(self: Any, decided: Any, cursor: Any) -> None:
        await commit(self, decided, cursor)
        self._cursor = type(cursor)("0-0")

    monkeypatch.setattr(term.Term, "_commit", forgets)
    assert first_broken(range(10)) is not None
