"""A turn's way to its next route: the time it has for it, and the rests after engines that were busy."""

from enum import Enum

import anyio

from relight.agents.replay.dispatch import Dispatch
from relight.agents.replay.limits import Limits
from relight.agents.replay.route import Route, Wanted
from relight.agents.replay.toll import Toll


class Late(Enum):
    """Which time ran out before there was a route."""

    DEADLINE = "the caller's timeout_s"
    RECOVERY = "recovery_timeout_s"


class Gate:
    """One turn's. `abort` may be called while another task waits in `route`."""

    def __init__(self, dispatch: Dispatch, limits: Limits, toll: Toll) -> None:
        now = anyio.current_time()
        self.deadline: float | None = None if limits.timeout_s is None else now + limits.timeout_s
        self._dispatch = dispatch
        self._recovery_s = limits.recovery_timeout_s
        self._toll = toll
        self._recover_by: float | None = None
        self._waiting: anyio.CancelScope | None = None

    def broken(self) -> None:
        """An attempt has ended: from now on the turn is being recovered."""
        if self._recover_by is None:
            self._recover_by = anyio.current_time() + self._recovery_s

    def passed(self) -> None:
        """Tokens come again."""
        self._recover_by = None

    def abort(self) -> None:
        """Whoever waits gets none."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def route(self, wanted: Wanted) -> Route | Late | None:
        """A route, counted on it; none where it was aborted."""
        if self._toll.rest_s is None and (route := self._dispatch.route_now(wanted)) is not None:
            return route
        found: Route | Late | None = None
        with anyio.CancelScope() as self._waiting:
            found = await self._wait(wanted)
        self._waiting = None
        return found

    async def _wait(self, wanted: Wanted) -> Route | Late:
        now = anyio.current_time()
        recover_by = now + self._recovery_s if self._recover_by is None else self._recover_by
        by = recover_by if self.deadline is None else min(self.deadline, recover_by)
        with anyio.move_on_after(by - now):
            await self._rest()
            return await self._dispatch.route(wanted)
        return Late.DEADLINE if by == self.deadline else Late.RECOVERY

    async def _rest(self) -> None:
        toll = self._toll
        if toll.rest_s is None or toll.avoid is None:
            return
        with anyio.move_on_after(toll.rest_s):
            if toll.elsewhere:
                await self._dispatch.other_than(toll.avoid)
            else:
                await anyio.sleep_forever()
        toll.rested()
