"""What bounds a turn, which ends count against it, and what goes with each of its requests."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from relight.agents.replay.turn import End

COUNTED = frozenset(
    {
        End.RESET,
        End.EOF,
        End.DONE_WITHOUT_FINISH,
        End.ERROR_FRAME,
        End.ERROR_FINISH,
        End.SERVER_ERROR,
        End.IDLE,
        End.FENCED,
        End.MALFORMED,
    }
)
"""Ends that count as an engine's failure of this turn: it held the request when it failed."""

SUSPECTED = COUNTED - {End.FENCED, End.MALFORMED} | {End.REFUSED}
"""Ends after which the route is passed over, by every turn, until a decision names it."""

POISON = 3
"""Deaths in flight after which a turn that is given up is called their possible cause."""

FINISH_S = 0.25
"""After the finish reason: how long the rest of the body may take, for the connection's sake."""

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits for an engine that is busy or aborts, where there is no other; the last one repeats."""


class Limits(NamedTuple):
    """What bounds a turn, in seconds and failures."""

    recovery_timeout_s: float
    max_engine_failures: int
    idle_timeout_s: float | None
    timeout_s: float | None


class Call(NamedTuple):
    """What goes with each of the turn's requests, beside tokens and parameters."""

    request_id: str
    session: str | None
    headers: Mapping[str, str]
    extra: Mapping[str, Any]
