"""Who starts an engine: the agent itself, or the application that it asks. A port with two sides.

A launcher brings the first processes of an incarnation into the tree, on disk before anything is made of
them, and knows when nothing more of it can come. Watching, stopping and proof are the same for both.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

from relight.agents.node import launch
from relight.agents.node.config import listens_on
from relight.agents.node.owned import Owned
from relight.events.values import Process

LOOPBACK = "127.0.0.1"


def of(owned: Owned) -> "Launcher":
    """Who starts this engine."""
    if owned.config.launcher == "process":
        return _BY_AGENT
    assert owned.shared.delegated is not None, "an agent with delegated engines has a desk"
    return owned.shared.delegated


class First(NamedTuple):
    """What a launch brought."""

    processes: tuple[Process, ...]
    """Held in the tree; the end of any of them is the engine's death."""
    host: str
    """Where it will listen, at the record's port."""
    on_weights: bool = True
    """Whether the weights that were asked for are those that it starts on."""


class Launcher(Protocol):
    """What `process` and `delegated` have in common."""

    async def launch(self, owned: Owned, weights: Path | None) -> First:
        """Start what was prepared. The caller gives the deadline. Raises StartFailure."""
        ...

    async def withdraw(self, owned: Owned, *, within_s: float) -> None:
        """Return once nothing more of this slot can be started; what came late is in the tree.

        Raises NotProven.
        """
        ...

    def ended(self, owned: Owned, incarnation: int, detail: str) -> None:
        """Take note that an incarnation is proven gone."""
        ...


class ByAgent:
    """`process`: the agent runs the command, in a session of its own."""

    async def launch(self, owned: Owned, weights: Path | None) -> First:
        leader = launch.run(owned, weights)
        owned.save(leader=leader, members=())
        owned.watch()
        return First((leader,), listens_on(owned.config) or LOOPBACK)

    async def withdraw(self, owned: Owned, *, within_s: float) -> None:
        """What was not run is never run."""

    def ended(self, owned: Owned, incarnation: int, detail: str) -> None:
        """Nobody else has to know."""


_BY_AGENT = ByAgent()
