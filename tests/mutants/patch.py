"""One mutant: a line of the product, and what stands there instead."""

from typing import NamedTuple

CORE = "orchestrator/core/"


class Patch(NamedTuple):
    """One safeguard that is taken away."""

    name: str
    path: str
    before: str
    """A line, or a part of one, that occurs exactly once in the file."""
    after: str
    aim: str = ""
    """Among which plans of the simulation it is hunted (`aims`); empty: all that there are."""
    seed: int | None = None
    """One of these that is known to find it: tried first in the short form."""
