"""What a weight sync is: something that hands over the weights of one version, when told to.

Every method but `exportable` is called in the thread that holds the weights (the application's, or a
boundary's export thread), inside an open boundary, and never from relight's bus thread. With several ranks
rank 0 exports, and the others join where the transport needs them.
"""

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import NamedTuple, Protocol, overload

from relight.agents.trainer.ranks import Ranks, Solo
from relight.events.decisions import SyncWeights
from relight.events.facts import WeightsPublished, WeightsSynced
from relight.events.ids import EngineName
from relight.events.values import Failed, Member
from relight.events.version import Version

Answer = WeightsPublished | WeightsSynced


class Context(NamedTuple):
    """What a session gives to its transports."""

    ranks: Ranks = Solo()
    in_use: Callable[[], Collection[Version]] = tuple
    """Versions that engines are loading or starting on right now, as far as decisions tell; any thread."""


class Left(Collection[EngineName]):
    """Which members have died or been fenced since the order came: a live view, to be asked again."""

    def __init__(self, members: Collection[Member], gone: Callable[[Member], bool]) -> None:
        self._members = members
        self._gone = gone
        self.before = frozenset(member.engine for member in members if gone(member))
        """Those that had left when the export began: the same on every rank."""

    def __contains__(self, name: object) -> bool:
        return any(member.engine == name and self._gone(member) for member in self._members)

    def __iter__(self) -> Iterator[EngineName]:
        return (member.engine for member in self._members if self._gone(member))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Left({list(self)})"


class WeightSync(Protocol):
    """A transport."""

    @property
    def pushes(self) -> bool:
        """Whether it writes into engines itself: one that is cut off may have touched every member."""
        ...

    @property
    def subset(self) -> bool:
        """Whether it can sync some engines and leave the others alone."""
        ...

    def bind(self, context: Context) -> None:
        """The session begins."""
        ...

    def exportable(self, version: Version) -> bool:
        """Whether `version` can be handed over, once more if it was before."""
        ...

    def joint(self, version: Version) -> bool:
        """Whether the other ranks are needed to export `version`. Asked on rank 0, where there are others."""
        ...

    def fingerprint(self) -> Hashable | None:
        """What changes when the live parameters do; None where that cannot be seen."""
        ...

    def export(self, order: SyncWeights, left: Left) -> Answer:
        """Hand over the weights of `order.version`, which the live parameters are.

        Returns what to publish: WeightsPublished for weights to be pulled, WeightsSynced for a push that
        ended, each member in it as loaded or failed. Anything it raises counts as failed for all members.
        """
        ...

    def join(self, order: SyncWeights, left: Left) -> None:
        """What another rank does while rank 0 exports: the same collectives in the same order."""
        ...

    def close(self) -> None:
        """The session ends."""
        ...


def refusal(order: SyncWeights, error: str, *, touched: bool = False) -> WeightsSynced:
    """The answer to an order that handed nothing over, or, `touched`, that nobody can say what it did."""
    return WeightsSynced(
        sync=order.sync,
        version=order.version,
        failed=tuple(Failed(member.engine, member.incarnation, error, touched) for member in order.members),
    )


@overload
def told(error: BaseException) -> str: ...
@overload
def told(error: BaseException | None) -> str | None: ...
def told(error: BaseException | None) -> str | None:
    """`error` in one line, for a fact or another rank."""
    return None if error is None else f"{type(error).__name__}: {error}"
