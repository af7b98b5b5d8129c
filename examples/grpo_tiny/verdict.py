"""What the runs add up to: figures, and whether rewards with and without faults are the same within noise.

The reward of a run is the mean of its last `LAST_STEPS` steps. Runs with the same seed are a pair: the same
weights, prompts and sampling seeds, once without faults and once with them. Two one-sided t-tests on the
pairs' differences, 5 % each: only when both say so are the rewards the same within `MARGIN`. So noise does
not pass for sameness: the more of it there is, the harder it is to pass.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from faults import Kill

LAST_STEPS = 8
MARGIN = 0.1
"""Of a reward between a quarter (chance) and one."""
ONE_PAIR_MARGIN = 0.2
"""Where one pair is all there is, and nothing can be said of its spread."""
RISE = 0.3
"""What every run must learn, at least."""
T_95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895}
"""Student's t, 95 %, by degrees of freedom."""
DRIFT = 1e-2
"""Nats between an engine's logprob and the trainer's own: another version's weights are off by more."""

Line = dict[str, Any]


class Verdict(NamedTuple):
    """All figures."""

    lines: tuple[Line, ...]
    """Of both kinds of runs, as train.py printed them, with `faults` in each."""
    kills: tuple[Kill, ...]
    wanted: int
    """Kills that were to be done."""
    pairs: tuple[tuple[float, float], ...]
    """Rewards without and with faults, by seed."""
    bound: float
    """The largest difference that the tests leave possible."""

    @property
    def missed(self) -> list[str]:
        """What fell short."""
        lost, stale = self.count("asked") - self.count("learned"), self.count("stale")
        found = {
            f"{len(self.kills)} of {self.wanted} kills were done": len(self.kills) != self.wanted,
            "no turn was interrupted": self.count("interrupted") == 0,
            f"{lost} samples lost": lost != 0,
            f"{stale} samples stale": stale != 0,
            f"logprobs off by {self.drift:.2g}": self.drift > DRIFT,
            f"a run learned {self.rise:.2f}, less than {RISE}": self.rise < RISE,
            f"rewards may differ by {self.bound:.3f}, more than {self.margin}": self.bound > self.margin,
        }
        return [text for text, true in found.items() if true]

    @property
    def margin(self) -> float:
        return MARGIN if len(self.pairs) > 1 else ONE_PAIR_MARGIN

    @property
    def drift(self) -> float:
        return max(line["drift"] for line in self.lines)

    @property
    def rise(self) -> float:
        """Of the run that learned least."""
        firsts = [line["reward"] for line in self.lines if line["step"] == 0]
        return min(min(pair) for pair in self.pairs) - max(firsts)

    def count(self, what: str) -> int:
        return sum(line[what] for line in self.lines)

    def told(self) -> str:
        """One line."""
        without, with_ = (statistics.mean(side) for side in zip(*self.pairs, strict=True))
        parts = (
            f"{len(self.lines)} steps in {len(self.pairs)} runs without and {len(self.pairs)} with faults",
            f"{len(self.kills)} kill{'' if len(self.kills) == 1 else 's'}",
            f"reward {without:.3f} without, {with_:.3f} with, the same within {self.bound:.3f}",
            f"{self.count('asked')} samples",
            f"{self.count('asked') - self.count('learned')} lost, {self.count('stale')} stale",
            f"{self.count('interrupted')} turns replayed, {self.count('kept')} of their tokens kept",
            f"logprobs off by {self.drift:.1g} at most",
        )
        fell_short = f"MISSED: {', '.join(self.missed)}" if self.missed else "met"
        return f"example-grpo: {'; '.join(parts)}: {fell_short}"


def of(lines: Sequence[Line], kills: Sequence[Kill], *, wanted: int) -> Verdict:
    """The verdict on complete runs; every seed has one without and one with faults."""
    seeds = sorted({line["seed"] for line in lines})
    pairs = tuple((_last(lines, seed, faults=False), _last(lines, seed, faults=True)) for seed in seeds)
    return Verdict(
        tuple(lines), tuple(kills), wanted, pairs, _bound([with_ - without for without, with_ in pairs])
    )


def _last(lines: Sequence[Line], seed: int, *, faults: bool) -> float:
    rewards = [line["reward"] for line in lines if (line["seed"], line["faults"]) == (seed, faults)]
    return statistics.mean(rewards[-LAST_STEPS:])


def _bound(differences: Sequence[float]) -> float:
    """|mean| and what its spread adds to it at 95 %; of one difference, itself."""
    if len(differences) == 1:
        return abs(differences[0])
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return abs(statistics.mean(differences)) + T_95[len(differences) - 1] * error
