"""relight: event-driven recovery of rollout engines for LLM reinforcement learning.

The import name of the three rooms `relight.events`, `relight.orchestrator` and `relight.agents`, and the
place of the few names an application needs. Each is loaded at first use, so that `import relight` costs
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relight.agents.replay.client import ReplayClient as ReplayClient
    from relight.agents.replay.turn import ReplayError as ReplayError
    from relight.agents.trainer.callback import CallbackSync as CallbackSync
    from relight.agents.trainer.session import OrchestratorLost as OrchestratorLost
    from relight.agents.trainer.session import trainer as trainer
    from relight.agents.trainer.snapshot import SnapshotSync as SnapshotSync
    from relight.events.errors import RelightError as RelightError

_HOMES = {
    "CallbackSync": "relight.agents.trainer.callback",
    "OrchestratorLost": "relight.agents.trainer.session",
    "RelightError": "relight.events.errors",
    "ReplayClient": "relight.agents.replay.client",
    "ReplayError": "relight.agents.replay.turn",
    "SnapshotSync": "relight.agents.trainer.snapshot",
    "trainer": "relight.agents.trainer.session",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'relight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
