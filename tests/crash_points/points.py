"""A point: where a process may die, by the name of the effect next to it and how often it was passed.

A case is one point, or two: the second is counted from the first death on. Names are the same in each run,
so a case that failed can be run again by its name.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, Self

import msgspec

Role = Literal["orchestrator", "agent"]
When = Literal["before", "after"]
BOTH = " & "
_NAME = re.compile(r"(orchestrator|agent) (before|after) (.+) #(\d+)")


class Point(NamedTuple):
    """One place in a process's course."""

    role: Role
    when: When
    what: str
    nth: int
    """The how-maniest passing of it, from 1, since the fault or since the death before."""

    def __str__(self) -> str:
        return f"{self.role} {self.when} {self.what} #{self.nth}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The point of that name; raises ValueError."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no point; one is `agent before call POST /pause #1`")
        return cls(match[1], match[2], match[3], int(match[4]))  # type: ignore[arg-type]


Case = tuple[Point, ...]
"""Where processes die, in order. Empty: nowhere."""


def name_of(case: Case) -> str:
    return BOTH.join(map(str, case))


def case_of(name: str) -> Case:
    """The case of that name; raises ValueError."""
    return tuple(map(Point.parse, name.split(BOTH))) if name else ()


class Plan(msgspec.Struct, frozen=True):
    """What victims read: which case is on, and where they shall die in it."""

    case: int
    """Counts up; 0: none, nothing is counted."""
    deaths: Case = ()


class Committed(msgspec.Struct, frozen=True):
    """One commit as its caller made it."""

    epoch: int
    number: int
    decisions: tuple[str, ...]
    """Ids; the silences that a commit writes have none."""


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a world's trace: somebody passed a point."""

    case: int
    pid: int
    deaths: int
    """How many of the case's deaths lay behind it."""
    stretch: int
    """Points with the same number lie in one stretch of code that nothing else can come between."""
    point: Point
    dies: bool = False
    failed: bool = False
    """After an effect that raised an error."""
    commit: Committed | None = None


class Files(NamedTuple):
    """Where a world and its victims meet."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def trace(self) -> Path:
        return self.root / "trace.jsonl"

    def claim(self, case: int, death: int) -> Path:
        """Made by the victim whose death it is: it dies once."""
        return self.root / "deaths" / f"{case}.{death}"

    def claimed(self, case: int) -> int:
        """How many of the case's deaths have happened."""
        count = 0
        while self.claim(case, count).exists():
            count += 1
        return count


def apart(passes: Sequence[Pass]) -> list[Point]:
    """The points that differ: after one effect and before the next are one where nothing comes between."""
    kept: dict[Point, None] = {}
    of_process: dict[int, list[Pass]] = {}
    for each in passes:
        of_process.setdefault(each.pid, []).append(each)
    for course in of_process.values():
        for here, next_ in pairwise([*course, None]):
            assert here is not None
            if here.point.when == "after" and next_ is not None and next_.stretch == here.stretch:
                continue
            kept[here.point] = None
    return list(kept)


def in_order(points: Iterable[Point], passes: Iterable[Pass]) -> list[Point]:
    """`points` in the order in which they were first passed."""
    wanted = set(points)
    return [point for point in dict.fromkeys(each.point for each in passes) if point in wanted]


def commits_done(passes: Iterable[Pass]) -> dict[tuple[int, int], tuple[str, ...]]:
    """The ids of the decisions of each commit that its caller saw done, by epoch and number."""
    return {
        (each.commit.epoch, each.commit.number): each.commit.decisions
        for each in passes
        if each.commit is not None and each.point.when == "after" and not each.failed
    }


def commits_under_way(passes: Iterable[Pass]) -> dict[tuple[int, int], tuple[str, ...]]:
    """The same of those whose caller had sent them, and died somewhere else before it saw them done."""
    passes = list(passes)
    done = commits_done(passes)
    dead = {each.pid for each in passes if each.dies}
    begun = {
        (each.commit.epoch, each.commit.number): each.commit.decisions
        for each in passes
        if each.commit is not None and each.point.when == "before" and not each.dies and each.pid in dead
    }
    return {key: names for key, names in begun.items() if key not in done}
