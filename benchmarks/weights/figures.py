"""Measured figures against their bars."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """One measured number. `bar`: what it may not be above (or below, where more is better); None: none."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    more_is_better: bool = False

    @property
    def met(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.more_is_better else self.value <= self.bar

    def told(self) -> str:
        bar = ""
        if self.bar is not None:
            sign = ">=" if self.more_is_better else "<="
            bar = f" (bar {sign} {self.bar:g}: {'met' if self.met else 'MISSED'})"
        return f"{self.name} {self.value:.3g} {self.unit}{bar}"


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000.0
