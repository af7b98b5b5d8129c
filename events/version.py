"""The version of weights: `RUN.STEP`, ordered as a pair of numbers.

A resumed trainer has a higher run, so its first version is never older than one it published before,
whatever its step counter says.
"""

from functools import total_ordering
from typing import Self


@total_ordering
class Version:
    """`RUN.STEP`. Immutable, hashable, ordered; `str()` is the form on the wire."""

    __slots__ = ("run", "step")
    run: int
    step: int

    def __init__(self, run: int, step: int) -> None:
        if run < 0 or step < 0:
            raise ValueError(f"version {run}.{step} has a negative part")
        object.__setattr__(self, "run", run)
        object.__setattr__(self, "step", step)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The version written as `RUN.STEP`; raises ValueError for anything else."""
        run, dot, step = text.partition(".")
        if not (dot and run.isascii() and run.isdigit() and step.isascii() and step.isdigit()):
            raise ValueError(f"version {text!r} is not RUN.STEP with two whole numbers")
        return cls(int(run), int(step))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Version is immutable: {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and (self.run, self.step) == (other.run, other.step)

    def __lt__(self, other: "Version") -> bool:
        return (self.run, self.step) < (other.run, other.step)

    def __hash__(self) -> int:
        return hash((self.run, self.step))

    def __str__(self) -> str:
        return f"{self.run}.{self.step}"

    def __repr__(self) -> str:
        return f"Version({self.run}, {self.step})"

    def __reduce__(self) -> tuple[type["Version"], tuple[int, int]]:
        return (Version, (self.run, self.step))


BASE = Version(0, 0)
"""The version of a job that no trainer has spoken for: the weights its engines started on."""
