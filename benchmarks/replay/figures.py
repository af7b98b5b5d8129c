"""What was measured, beside its bar."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple


class Figure(NamedTuple):
    """One number. `bar`: none where nothing is asked of it."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    bound: Literal["least", "most"] = "least"

    @property
    def met(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.bound == "least" else self.value <= self.bar


def shown(figures: Iterable[Figure]) -> str:
    """One a line."""
    lines: list[str] = []
    for figure in figures:
        bar = "" if figure.bar is None else f"at {figure.bound} {figure.bar:g} {figure.unit}"
        word = "" if figure.bar is None else (": met" if figure.met else ": MISSED")
        lines.append(f"  {figure.name:56} {figure.value:10.3g} {figure.unit:8} {bar}{word}".rstrip())
    return "\n".join(lines)


def line(figures: Sequence[Figure]) -> str:
    """All with a bar, in one line."""
    barred = [figure for figure in figures if figure.bar is not None]
    said = ", ".join(f"{figure.name} {figure.value:.3g} {figure.unit}".rstrip() for figure in barred)
    missed = [figure.name for figure in barred if not figure.met]
    return f"bench-replay: {said}: {'MISSED ' + ', '.join(missed) if missed else 'met'}"


def ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """The median over rounds of the second by the first: both of a round met the same machine."""
    return statistics.median(second / first for first, second in pairs)
