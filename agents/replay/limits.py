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

DEATHS = COUNTED - {End.MALFORMED}
"""Ends that speak of the engine's death with this turn in flight."""

RESTED = frozenset({End.OVERLOADED, End.ABORTED, End.EXHAUSTED, End.MALFORMED})
"""Ends after which the next attempt waits a little: nothing has died, and the route stands."""

UNHEARD = frozenset(
    {End.CANCELLED, End.DEADLINE, End.FENCED, End.WITHDRAWN, End.IDLE}
    | {End.VERSION_MOVED, End.MALFORMED, End.RESET}
)
"""Ends that an engine which lives on may not have noticed: it is asked to abort the request."""

SUSPECT = 2
"""Engines that died with a turn in flight, from which on it runs alone where there is a choice."""

POISON = 3
"""Engines that died with a turn in flight, from which on a turn that is given up is called their cause."""

FINISH_S = 0.25
"""After the finish reason: how long the rest of the body may take, for the connection's sake."""

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits after such ends, one after another without a token; the last one repeats. Each is drawn out by up
to a half at random. After the first, another engine is tried at once where there is one."""


class Limits(NamedTuple):
    """What bounds a turn, in seconds and failures."""

    recovery_timeout_s: float
    max_engine_failures: int
    idle_timeout_s: float | None
    timeout_s: float | None
    check_seam: float | None = None
    """The largest drift over which kept tokens are continued, in nats; none measures nothing."""


class Call(NamedTuple):
    """What goes with each of the turn's requests, beside tokens and parameters."""

    request_id: str
    session: str | None
    headers: Mapping[str, str]
    extra: Mapping[str, Any]
