"""What replays cost and what they do to the samples, counted at each turn's end. Pure.

Two books are kept of the same entries: one for ever, which metrics show, and one since the step began, which
a trainer's log shows. A token is kept where a continuation did not have to sample it again, once for each
continuation; it is regenerated where it had come, was dropped, and was sampled again.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from relight.agents.replay.turn import Attempt, Turn


class Outcome(StrEnum):
    """How a turn ended."""

    COMPLETE = "complete"
    GIVEN_UP = "given_up"
    """It met `max_engine_failures`."""
    POISON = "poison"
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"
    ABANDONED = "abandoned"
    """The caller aborted, cancelled or left it."""


class How(StrEnum):
    """How an attempt after the first went on."""

    CONTINUED = "continued"
    """After the kept tokens."""
    RESTARTED = "restarted"
    """From the prompt, although tokens were there."""
    AGAIN = "again"
    """From the prompt, since nothing had come."""


class Account(NamedTuple):
    """One turn at its end."""

    turn: Turn
    outcome: Outcome
    taken: int
    """Tokens that came, those that were dropped again among them."""
    suspect: bool
    """It was in flight in two deaths."""
    gaps_s: tuple[float, ...]
    """From each break to the next token."""

    @property
    def interrupted(self) -> bool:
        return len(self.turn.attempts) > 1


class Book:
    """What was counted since it was opened."""

    def __init__(self) -> None:
        self.turns: Counter[tuple[Outcome, bool]] = Counter()
        """By outcome and whether they were interrupted."""
        self.suspects = 0
        self.tokens = self.kept = self.regenerated = 0
        self.replays: Counter[tuple[str, How]] = Counter()
        """By why the attempt before ended, and how the next one went on."""
        self.restarts: Counter[str] = Counter()
        """Why tokens that were there were not continued; versions and details left out."""
        self.mixed = self.unknown = 0
        """Complete turns with tokens of more than one version; of a version that nobody knows."""
        self.lengths: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        """Lengths of complete samples, by whether their turn was interrupted."""
        self.gaps_s: Counter[float] = Counter()
        """Breaks by length, in seconds, to three significant digits."""

    def add(self, account: Account) -> None:
        turn = account.turn
        self.turns[account.outcome, account.interrupted] += 1
        self.suspects += account.suspect
        there = sum(len(choice.token_ids) for choice in turn.choices)
        self.tokens += there
        self.kept += turn.kept_tokens
        self.regenerated += account.taken - there
        for before, attempt in zip(turn.attempts, turn.attempts[1:], strict=False):
            self.replays[before.reason, _how(attempt)] += 1
            if attempt.restarted is not None:
                self.restarts[attempt.restarted.partition(":")[0].partition(" from ")[0]] += 1
        self.gaps_s.update(float(f"{gap_s:.3g}") for gap_s in account.gaps_s)
        if account.outcome is Outcome.COMPLETE:
            self._complete(turn, interrupted=account.interrupted)

    def _complete(self, turn: Turn, *, interrupted: bool) -> None:
        self.lengths[interrupted].update(len(choice.token_ids) for choice in turn.choices)
        self.mixed += any(len({span.version for span in choice.versions}) > 1 for choice in turn.choices)
        self.unknown += any(
            sum(end - start for _, start, end in choice.versions) != len(choice.token_ids)
            for choice in turn.choices
        )


def _how(attempt: Attempt) -> How:
    if attempt.kept:
        return How.CONTINUED
    return How.AGAIN if attempt.restarted is None else How.RESTARTED


class Numbers:
    """Both books of one client."""

    def __init__(self) -> None:
        self.ever = Book()
        self._step = Book()

    def add(self, account: Account) -> None:
        """Count a turn that has ended."""
        self.ever.add(account)
        self._step.add(account)

    def take(self) -> dict[str, Any]:
        """What was counted since the last call; the next begins at nothing."""
        taken, self._step = self._step, Book()
        return summary(taken)


def summary(book: Book) -> dict[str, Any]:
    """A book in plain words and numbers, for a trainer's log. Shares are none where nothing was counted."""
    complete = sum(count for (outcome, _), count in book.turns.items() if outcome is Outcome.COMPLETE)
    cut, whole = _lengths(book.lengths[True]), _lengths(book.lengths[False])
    return {
        "turns": sum(book.turns.values()),
        "turns_interrupted": sum(count for (_, cut), count in book.turns.items() if cut),
        **{f"turns_{outcome}": sum(book.turns[outcome, cut] for cut in (False, True)) for outcome in Outcome},
        "turns_suspect": book.suspects,
        "tokens": book.tokens,
        "tokens_kept": book.kept,
        "tokens_regenerated": book.regenerated,
        "replays": sum(book.replays.values()),
        "replays_by_reason": _by(book.replays, 0),
        "replays_by_way": _by(book.replays, 1),
        "restarts_by_reason": dict(book.restarts),
        "mixed_version_share": book.mixed / complete if complete else None,
        "unknown_version_share": book.unknown / complete if complete else None,
        "length_interrupted": cut,
        "length_uninterrupted": whole,
        "length_ratio": cut["mean"] / whole["mean"] if cut["mean"] and whole["mean"] else None,
        "gap_s": _lengths(book.gaps_s),
    }


def _by(replays: Mapping[tuple[str, How], int], place: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for key, count in replays.items():
        found[str(key[place])] += count
    return dict(found)


def _lengths(counted: Counter[int] | Counter[float]) -> dict[str, Any]:
    """Count, mean and quantiles of what was counted, by nearest rank."""
    total = sum(counted.values())
    if not total:
        return {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    ordered = sorted(counted.items())
    return {
        "count": total,
        "mean": sum(value * count for value, count in ordered) / total,
        **{f"p{percent}": _quantile(ordered, total * percent / 100) for percent in (50, 90, 99)},
        "max": ordered[-1][0],
    }


def _quantile(ordered: list[tuple[Any, int]], rank: float) -> Any:
    seen = 0
    for value, count in ordered:
        seen += count
        if seen >= rank:
            return value
    return ordered[-1][0]
