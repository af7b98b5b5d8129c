"""The attempt under way: all that it holds, let go of in one place, and the record that is left of it."""

import asyncio
import time
from dataclasses import dataclass

import anyio

from relight.agents.replay.ledger import Ask
from relight.agents.replay.route import Boarded
from relight.agents.replay.stream import Flight
from relight.agents.replay.turn import Attempt, End


@dataclass(slots=True)
class Aloft:
    """One request to one engine, from its boarding to its landing."""

    flight: Flight
    boarded: Boarded
    ask: Ask
    request_id: str
    began: float
    started_at: float
    timer: asyncio.TimerHandle | None
    seam_drift: float | None = None
    first_token_s: float | None = None

    def land(self, end: End, detail: str, *, made: int) -> Attempt:
        """It is over; `made`: new tokens that were taken from it."""
        if self.timer is not None:
            self.timer.cancel()
        self.flight.close()
        route, ask = self.boarded.route, self.ask
        return Attempt(
            engine=route.key.engine,
            incarnation=route.key.incarnation,
            version=str(self.boarded.version),
            request_id=self.request_id,
            kept=ask.kept,
            sent=len(ask.token_ids),
            max_tokens=ask.sampling_params.get("max_tokens"),
            made=made,
            seam_drift=self.seam_drift,
            restarted=ask.restarted,
            reason=end,
            detail=detail,
            started_at=self.started_at,
            first_token_s=self.first_token_s,
            seconds=anyio.current_time() - self.began,
        )


def take_off(flight: Flight, boarded: Boarded, ask: Ask, *, request_id: str, deadline: float | None) -> Aloft:
    """An attempt that begins now, and is cut off at the turn's `deadline` where it has one."""
    timer: asyncio.TimerHandle | None = None
    if deadline is not None:
        late = (End.DEADLINE, "the caller's timeout_s has passed")
        timer = asyncio.get_running_loop().call_at(deadline, flight.cut, *late)
    return Aloft(flight, boarded, ask, request_id, anyio.current_time(), time.time(), timer)
