"""The members of a sync that the application does by itself."""

from collections.abc import Sequence
from typing import overload

from relight.agents.trainer.sync import Left
from relight.events.decisions import SyncWeights
from relight.events.errors import UsageError
from relight.events.facts import WeightsSynced
from relight.events.ids import EngineName
from relight.events.values import Failed, Loaded, Member


class Members(Sequence[Member]):
    """Who is to be reached (engine, incarnation, address), who has left since, and who failed."""

    def __init__(self, members: Sequence[Member], left: Left) -> None:
        self._members = tuple(members)
        self._errors: dict[EngineName, str] = {}
        self.left = left
        """Engines that died since: a live view, not to be waited for."""

    @property
    def errors(self) -> dict[EngineName, str]:
        """Who failed so far, and how."""
        return dict(self._errors)

    def fail(self, engine: str, error: str) -> None:
        """The sync of `engine` failed; it may hold anything now and is restarted. Raises UsageError."""
        if engine not in {member.engine for member in self._members}:
            raise UsageError(f"engine {engine!r} is no member of this sync")
        self._errors[EngineName(engine)] = error

    def answer(self, order: SyncWeights) -> WeightsSynced:
        """What came of it: who neither failed nor left has loaded."""
        lost: dict[str, str] = dict.fromkeys(map(str, self.left), "left") | {
            str(engine): error for engine, error in self._errors.items()
        }
        return WeightsSynced(
            sync=order.sync,
            version=order.version,
            loaded=tuple(Loaded(m.engine, m.incarnation) for m in order.members if m.engine not in lost),
            failed=tuple(
                Failed(m.engine, m.incarnation, lost[m.engine], True)
                for m in order.members
                if m.engine in lost
            ),
        )

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | Sequence[Member]:
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)
