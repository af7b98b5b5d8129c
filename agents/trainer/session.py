"""Where an application begins: `relight.trainer`, and the errors that its calls may raise."""

import os
from typing import Literal

from relight.agents.adapters import torch_ranks
from relight.agents.trainer.api import Trainer
from relight.agents.trainer.barrier import Release
from relight.agents.trainer.disabled import Disabled
from relight.agents.trainer.joined import Joined
from relight.agents.trainer.patience import OrchestratorLost, Superseded
from relight.agents.trainer.ranks import RankFailed, RanksLost, Solo
from relight.agents.trainer.run import Run
from relight.agents.trainer.settings import OnLost, Settings
from relight.agents.trainer.snapshot import SnapshotSync
from relight.agents.trainer.sync import WeightSync
from relight.agents.trainer.transports import transports
from relight.events.errors import UsageError

__all__ = ["OrchestratorLost", "RankFailed", "RanksLost", "Superseded", "trainer"]


def trainer(  # noqa: PLR0913 -- the public signature
    url: str | None = None,
    *,
    job: str,
    sync: WeightSync | None = None,
    snapshots: SnapshotSync | None = None,
    ranks: Literal["all", "one"] = "all",
    orchestrator_grace_s: float = Settings().orchestrator_grace_s,
    on_lost: OnLost | None = None,
    orphan_deadline_s: float = Settings().orphan_deadline_s,
    max_unsynced_steps: int = Settings().max_unsynced_steps,
    release: Release = "routed",
    connect_s: float = Settings().connect_s,
    flush_s: float = Settings().flush_s,
    rank_deadline_s: float = Settings().rank_deadline_s,
) -> Trainer:
    """A session of the trainer of `job` on the bus at `url` (none: RELIGHT_BUS_URL), to be entered by `with`.

    `sync` moves the weights; without one the application does (`syncing`, `published`). `snapshots` are
    written beside a `sync` that pushes, and recoveries are served by them. What the times and numbers mean
    stands in `Settings`. With RELIGHT_DISABLE=1 every call does nothing, `wait` only calls its function.

    Where torch.distributed is initialised every rank of it makes this call and all others, in one order, and
    what a `wait` runs uses no group that an export uses; `ranks="one"`: this process alone is the trainer.
    Raises UsageError, RanksLost.
    """
    try:
        settings = Settings(
            orchestrator_grace_s=orchestrator_grace_s,
            on_lost=on_lost,
            orphan_deadline_s=orphan_deadline_s,
            max_unsynced_steps=max_unsynced_steps,
            release=release,
            connect_s=connect_s,
            flush_s=flush_s,
            rank_deadline_s=rank_deadline_s,
        )
    except ValueError as error:
        raise UsageError(f"relight.trainer: {error}") from None
    given = transports(sync, snapshots)
    if os.environ.get("RELIGHT_DISABLE") == "1":
        return Disabled()
    url = url or os.environ.get("RELIGHT_BUS_URL")
    if not url:
        raise UsageError("relight.trainer needs the bus URL, as its argument or in RELIGHT_BUS_URL")
    group = torch_ranks.ranks(deadline_s=rank_deadline_s) if ranks == "all" else Solo()
    if group.rank != 0:
        return Joined(group, transports=given)
    return Run(url, job=job, transports=given, settings=settings, ranks=group)
