"""CallbackSync: the application moves the weights itself, relight tells it to whom.

The function is called once a version unless it is declared idempotent: an application's transfer may have
side effects (counters, groups) that a second call would double.
"""

from collections.abc import Callable, Mapping
from typing import cast

from relight.agents.trainer.sync import Context, Left, refusal
from relight.events.decisions import SyncWeights
from relight.events.errors import UsageError
from relight.events.facts import WeightsSynced
from relight.events.ids import EngineName
from relight.events.values import Failed, Loaded, Member
from relight.events.version import Version

Update = Callable[[Version, tuple[Member, ...], Left], Mapping[str, str] | None]
"""`fn(version, members, left) -> {engine: error}`, or None where all went well."""


class CallbackSync:
    """A push by the application's own `update_weights(version, members, left)`.

    `members` are (engine, incarnation, address); `left` is a live view of the members that have died since,
    not to be waited for. What `fn` returns names the engines that failed; those are taken for touched, as
    all are when it raises. `subset=False`: it reaches all engines or none (one group, one broadcast).
    With several ranks it is called on each of them at the same time.
    """

    pushes = True

    def __init__(self, fn: Update, *, idempotent: bool = False, subset: bool = True) -> None:
        self.subset = subset
        self._fn = fn
        self._idempotent = idempotent
        self._called: set[Version] = set()

    def bind(self, context: Context) -> None:
        """It needs nothing of the session."""

    def joint(self, version: Version) -> bool:
        """`fn` is called on every rank: it may gather what they hold."""
        return True

    def join(self, order: SyncWeights, left: Left) -> None:
        """Call `fn` beside rank 0, whose answer counts."""
        members = _reached(order, left)
        if members and self.exportable(order.version):
            self._called.add(order.version)
            self._fn(order.version, members, left)

    def exportable(self, version: Version) -> bool:
        """Whether `fn` may be called for `version`, perhaps again."""
        return self._idempotent or version not in self._called

    def fingerprint(self) -> None:
        """The application's weights are not seen from here."""

    def export(self, order: SyncWeights, left: Left) -> WeightsSynced:
        """Call `fn` if anybody is there; raises what it raises, and UsageError where its answer is none."""
        if not self.exportable(order.version):
            return refusal(order, f"{order.version} was pushed once and the callback is not idempotent")
        members = _reached(order, left)
        errors: Mapping[EngineName, str] = {}
        if members:
            self._called.add(order.version)
            errors = self._checked(members, self._fn(order.version, members, left))
        lost = dict.fromkeys(left, "left") | dict(errors)
        return WeightsSynced(
            sync=order.sync,
            version=order.version,
            loaded=tuple(Loaded(m.engine, m.incarnation) for m in order.members if m.engine not in lost),
            failed=tuple(
                Failed(m.engine, m.incarnation, lost[m.engine], m in members)
                for m in order.members
                if m.engine in lost
            ),
        )

    def _checked(self, members: tuple[Member, ...], answer: object) -> Mapping[EngineName, str]:
        if answer is None:
            return {}
        if not isinstance(answer, Mapping):
            raise UsageError(f"the weight callback returned {answer!r}, expected {{engine: error}} or None")
        errors = cast(Mapping[EngineName, str], answer)
        if unknown := errors.keys() - {member.engine for member in members}:
            raise UsageError(
                f"the weight callback named {sorted(unknown)}, which are no members of this sync"
            )
        return {name: str(error) for name, error in errors.items()}

    def close(self) -> None:
        """Nothing is held."""


def _reached(order: SyncWeights, left: Left) -> tuple[Member, ...]:
    return tuple(member for member in order.members if member.engine not in left.before)
