"""A ledger that gives out an answer's events while it takes them. Pure.

The invariant: what is given out is one answer, whatever happened under it. Nothing of an attempt that is
replayed from the prompt comes after something of another; the finish comes last, when nothing can be wrong
any more.
"""

from collections.abc import Sequence

from relight.agents.replay.ledger import Ask, Ledger
from relight.agents.replay.params import Params

SPOILT = "tokens that were sent are void"


class Delivery(Ledger):
    """`take` empties it as it fills; `last` is the rest, once it is complete. Both give events' data."""

    def __init__(self, prompt: Sequence[int], params: Params) -> None:
        """Raises UsageError for parameters that a streamed answer cannot serve."""
        super().__init__(prompt, params)
        self._rules = self._rules._replace(keeps_scored=False)
        self._ready: list[bytes] = []
        self._given = 0
        self._before = 0
        """What had been given when the attempt under way began."""
        self._spoilt = False
        """What was given out has no tokens behind it any more."""

    def why_replayed(self, version: str) -> str | None:
        return SPOILT if self._spoilt else super().why_replayed(version)

    def ask(self, *, attempt: int, version: str) -> Ask:
        ask = super().ask(attempt=attempt, version=version)
        if ask.kept == 0:
            self._forget()
        self._before = self._given
        return ask

    def _forget(self) -> None:
        """Begin anew: what has not been taken is void."""
        self._ready = []
        self._given = 0

    def reject(self) -> None:
        super().reject()
        void = self._given - self._before
        if void > len(self._ready):
            self._spoilt = True
            return
        del self._ready[len(self._ready) - void :]
        self._given = self._before

    def _give(self, payload: bytes) -> None:
        self._ready.append(payload)
        self._given += 1

    def take(self) -> list[bytes]:
        """What is ready, each once."""
        ready, self._ready = self._ready, []
        return ready

    def last(self) -> list[bytes]:
        """What follows when the answer is complete, beside what is ready."""
        return []
