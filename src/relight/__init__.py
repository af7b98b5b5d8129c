"""relight: event-driven recovery of rollout engines for LLM reinforcement learning.

The import name of the three rooms `relight.events`, `relight.orchestrator` and `relight.agents`, and the
place of the few names an application needs. Each is loaded at first use, so that `import relight` costs
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relight.agents.control.engine import engine as engine
    from relight.agents.control.outcome import NotYet as NotYet
    from relight.agents.node.delegated.application import Order as Order
    from relight.agents.node.delegated.application import Started as Started
    from relight.agents.node.delegated.application import delegate as delegate
    from relight.agents.replay.client import ReplayClient as ReplayClient
    from relight.agents.replay.turn import ReplayError as ReplayError
    from relight.agents.trainer.callback import CallbackSync as CallbackSync
    from relight.agents.trainer.session import OrchestratorLost as OrchestratorLost
    from relight.agents.trainer.session import RankFailed as RankFailed
    from relight.agents.trainer.session import RanksLost as RanksLost
    from relight.agents.trainer.session import trainer as trainer
    from relight.agents.trainer.snapshot import SnapshotSync as SnapshotSync
    from relight.agents.trainer.transfer import VllmTransferSync as VllmTransferSync
    from relight.events.errors import RelightError as RelightError

_HOMES = {
    "CallbackSync": "relight.agents.trainer.callback",
    "Order": "relight.agents.node.delegated.application",
    "OrchestratorLost": "relight.agents.trainer.session",
    "RelightError": "relight.events.errors",
    "ReplayClient": "relight.agents.replay.client",
    "ReplayError": "relight.agents.replay.turn",
    "RankFailed": "relight.agents.trainer.session",
    "RanksLost": "relight.agents.trainer.session",
    "SnapshotSync": "relight.agents.trainer.snapshot",
    "VllmTransferSync": "relight.agents.trainer.transfer",
    "Started": "relight.agents.node.delegated.application",
    "NotYet": "relight.agents.control.outcome",
    "delegate": "relight.agents.node.delegated.application",
    "engine": "relight.agents.control.engine",
    "trainer": "relight.agents.trainer.session",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'relight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
