"""Waiting for the orchestrator in one full sync: for its orders and its release, never longer than allowed.

An orchestrator is absent while nobody holds the job's lease, or the bus cannot be asked. One that is there
but says nothing of this boundary is given much longer, since it may wait for engines within their own
deadlines; an order's deadline counts as a word.
"""

import time
from enum import Enum

from relight.agents.trainer.gate import Gate
from relight.agents.trainer.link import Link
from relight.agents.trainer.settings import Settings
from relight.events.decisions import SyncWeights
from relight.events.errors import RelightError


class OrchestratorLost(RelightError):
    """No orchestrator took part in a sync for longer than the settings allow."""


class Superseded(RelightError):
    """Another trainer has taken over the job: this one's words are void."""


class End(Enum):
    """How the wait for a release ended."""

    RELEASED = "released"
    OBSERVED = "observed"
    """By an orchestrator that only looks on."""
    ABSENT = "absent"
    SILENT = "silent"


class Patience:
    """One boundary's. `grace_s`: how long an absent orchestrator is waited for."""

    def __init__(self, gate: Gate, link: Link, settings: Settings, *, grace_s: float) -> None:
        self._gate = gate
        self._link = link
        self._silence_s = settings.orphan_deadline_s
        self._grace_s = grace_s
        self._heard = 0
        self._opened = self._since = time.monotonic()
        """When a word on this boundary was last heard."""

    def next(self, *, within_s: float | None = None) -> SyncWeights | End | None:
        """The next order, taken, or how the wait ended; None after `within_s`. Raises Superseded."""
        gate = self._gate
        back_at = float("inf") if within_s is None else time.monotonic() + within_s
        with gate.changed:
            while True:
                here = gate.barrier
                if here.newer is not None:
                    raise Superseded(f"run {here.newer} has taken over the job, this is run {here.run}")
                if here.released is not None:
                    return End.RELEASED
                if here.observed:
                    return End.OBSERVED
                if (order := gate.take()) is not None:
                    return order
                left_s, end = min(
                    (self._grace_left_s(), End.ABSENT), (self._word_left_s(), End.SILENT), key=_first
                )
                if left_s <= 0:
                    return end
                rest_s = back_at - time.monotonic()
                if rest_s <= 0:
                    return None
                gate.changed.wait(min(left_s, rest_s))

    def _grace_left_s(self) -> float:
        if self._link.failure is not None:
            return 0.0
        return max(self._opened, self._link.seen_at) + self._grace_s - time.monotonic()

    def _word_left_s(self) -> float:
        here = self._gate.barrier
        if here.heard != self._heard:
            self._heard, self._since = here.heard, time.monotonic()
        promised = self._link.seconds_until(here.patience) if here.patience else 0.0
        return max(promised, 0.0) + self._since + self._silence_s - time.monotonic()


def _first(pair: tuple[float, End]) -> float:
    return pair[0]
