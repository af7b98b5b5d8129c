"""Which version the live parameters are, so that nothing else is ever exported under a version's name.

They are the version of the last `mark` (a sync of that step began) for as long as nothing says otherwise:
another step, a changed tensor, foreign weights swapped in.
"""

from collections.abc import Callable, Hashable, Sequence

from relight.agents.trainer.sync import WeightSync
from relight.agents.trainer.transports import Transports
from relight.events.errors import UsageError
from relight.events.version import Version


class Live:
    """The live parameters of one rank in one run. Used in the thread that holds them.

    `sync` is what a recovery would export by; `beside`, another transport that sees the parameters.
    """

    def __init__(self, run: int, sync: WeightSync | None, *, beside: Sequence[WeightSync] = ()) -> None:
        self._run = run
        self._sync = sync
        self._seers = (*([sync] if sync is not None else []), *beside)
        self._fingerprint: tuple[Hashable | None, ...] = ()
        self._marks = 0
        """Counts `mark`."""
        self.version: Version | None = None
        """Last marked; none before the first."""
        self.swapped = False
        """Whether foreign weights are in the model; nothing is exported then."""

    def swap(self) -> Callable[[], None]:
        """Foreign weights come in. What is returned says that those of before are back.

        Weights that are written back into their own tensors look changed and are not: where what goes out is
        the last marked version, what comes back is that too. A swap inside another one, or behind one that
        nobody ended, ends nothing.
        """
        outermost = not self.swapped
        marked = self._marks if self.version is not None and self._seen() == self._fingerprint else None
        self.swapped = True

        def back() -> None:
            if not outermost or not self.swapped:
                return
            self.swapped = False
            if marked == self._marks:
                self._fingerprint = self._seen()

        return back

    def mark(self, step: int) -> Version:
        """The live parameters are those of `step` now.

        Raises UsageError for a step below the last one, and for the same step with changed weights: a
        version stands for one content for ever.
        """
        version = Version(self._run, step)
        seen = self._seen()
        if self.version is not None:
            if version < self.version:
                raise UsageError(f"step {step} is below step {self.version.step}, which was synced before")
            if version == self.version and seen != self._fingerprint:
                raise UsageError(f"step {step} was synced before and the weights have changed: count a step")
        self.version = version
        self._marks += 1
        self._fingerprint = seen
        self.swapped = False
        return version

    def exports(self, step: int | None) -> Version | None:
        """What can be exported at a boundary of `step` (none: the last one); none where nothing can.

        The first boundary of a run marks what it finds: there is nothing older that it could differ from.
        """
        if self._sync is None or self.swapped:
            return None
        if self.version is None:
            return self.mark(step or 0)
        if step is not None and step != self.version.step:
            return None
        if self._seen() != self._fingerprint or not self._sync.exportable(self.version):
            return None
        return self.version

    def _seen(self) -> tuple[Hashable | None, ...]:
        return tuple(sync.fingerprint() for sync in self._seers)


def live(run: int, transports: Transports) -> Live:
    """The live parameters as the transports of a session see them."""
    beside = [one for one in transports.joined if one is not transports.recoveries]
    return Live(run, transports.recoveries, beside=beside)
