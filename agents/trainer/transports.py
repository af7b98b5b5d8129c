"""The transports of one session: the ordinary one, and snapshots beside one that pushes.

Recoveries are served by the snapshots where there are any: they reach the engines that lack weights and
nobody else, and cost nothing where the version stands.
"""

from typing import NamedTuple

from relight.agents.trainer.snapshot import SnapshotSync
from relight.agents.trainer.sync import Context, WeightSync
from relight.events.errors import UsageError


class Transports(NamedTuple):
    """Who hands the weights over. Made by `transports`."""

    ordinary: WeightSync | None = None
    snapshots: SnapshotSync | None = None
    """Beside an ordinary one that pushes; none where that writes them itself."""

    @property
    def recoveries(self) -> WeightSync | None:
        """What serves engines that lack weights between two ordinary syncs."""
        return self.snapshots or self.ordinary

    @property
    def joined(self) -> tuple[WeightSync, ...]:
        return tuple(one for one in (self.ordinary, self.snapshots) if one is not None)

    def bind(self, context: Context) -> None:
        for one in self.joined:
            one.bind(context)

    def close(self) -> None:
        for one in self.joined:
            one.close()


def transports(sync: WeightSync | None, snapshots: SnapshotSync | None) -> Transports:
    """What `relight.trainer` was given, where it fits together; raises UsageError."""
    if snapshots is not None and (sync is None or not sync.pushes):
        raise UsageError("snapshots= stands beside a sync= that pushes; give SnapshotSync as sync= otherwise")
    if isinstance(sync, SnapshotSync) and sync.publish_every > 1:
        raise UsageError(
            f"publish_every={sync.publish_every}: engines that pull need every version;"
            " it is for snapshots= beside a sync= that pushes"
        )
    return Transports(sync, snapshots)
