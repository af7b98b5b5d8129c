"""The errors that a turn can end with, in their words, and as they are counted. Pure."""

from relight.agents.replay.gate import Late
from relight.agents.replay.limits import Limits
from relight.agents.replay.stream import Rejected
from relight.agents.replay.tally import Outcome
from relight.agents.replay.toll import Toll
from relight.agents.replay.turn import (
    NoRoute,
    PoisonRequestError,
    ReplayError,
    ReplayTimeout,
    RequestRejected,
    Turn,
)


def late(why: Late, limits: Limits, turn: Turn) -> ReplayError:
    if why is Late.DEADLINE:
        return ReplayTimeout(f"not complete within {limits.timeout_s:g} s{_so_far(turn)}", turn)
    return NoRoute(f"no route within {limits.recovery_timeout_s:g} s{_so_far(turn)}", turn)


def given_up(toll: Toll, turn: Turn) -> ReplayError:
    message = f"given up after {toll.failures} engine failures{_so_far(turn)}"
    if toll.poison:
        return PoisonRequestError(f"{message}; the request may be their cause", turn)
    return ReplayError(message, turn)


def refused(rejected: Rejected, turn: Turn) -> ReplayError:
    last = turn.attempts[-1]
    message = f"{last.engine}.{last.incarnation} refused the request: {rejected}"
    return RequestRejected(message, turn, status=rejected.status, body=rejected.body)


def outcome_of(error: ReplayError) -> Outcome:
    """How the turn that `error` ends is counted."""
    match error:
        case PoisonRequestError():
            return Outcome.POISON
        case ReplayTimeout():
            return Outcome.TIMED_OUT
        case RequestRejected():
            return Outcome.REJECTED
        case _:
            return Outcome.GIVEN_UP


def _so_far(turn: Turn) -> str:
    ends = ", ".join(f"{each.engine}.{each.incarnation} {each.reason}" for each in turn.attempts)
    return f"; {len(turn.token_ids)} tokens so far; attempts: {ends or 'none'}"
