"""`relight.engine`: a handle on one slot, whatever fills it.

Looking is done over the engine's own HTTP. Ending and restarting are wishes on the bus, as an operator's are:
they go through all the rules, and the handle waits for what becomes of them. Each call opens what it needs
and closes it; a handle holds nothing.
"""

import math
import os
from collections.abc import Callable

import anyio

from relight.agents.adapters import vllm
from relight.agents.control import observe, outcome
from relight.agents.control.observe import EngineSnapshot, Health
from relight.events.bus.client import open_bus
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable, UsageError
from relight.events.facts import DrainRequested, RestartRequested
from relight.events.ids import EngineName, JobName, engine_name, job_name
from relight.events.schema import EngineState
from relight.events.values import Phase


def engine(url: str | None = None, *, job: str, name: str) -> "Engine":
    """A handle on the engine `name` of `job`, on the bus at `url` (none: RELIGHT_BUS_URL).

    Raises UsageError.
    """
    found = url or os.environ.get("RELIGHT_BUS_URL")
    if not found:
        raise UsageError("relight.engine needs the bus URL, as its argument or in RELIGHT_BUS_URL")
    return Engine(found, job_name(job), engine_name(name))


class Engine:
    """One engine's slot. Every call takes a finite time-out above 0 and raises UsageError for another one.

    All of them raise BusUnavailable where the bus is away, and UsageError where the job has no such engine.
    """

    def __init__(self, url: str, job: JobName, name: EngineName) -> None:
        self._url = url
        self._job = job
        self.name = name

    async def check_health(self, *, timeout_s: float) -> Health:
        """How it is, as far as can be seen from here within that time. An ill engine is no exception."""
        deadline = _deadline(timeout_s)
        state = await self._state(deadline, timeout_s)
        async with vllm.session() as http:
            return await observe.health(http, self.name, state, deadline=deadline)

    async def snapshot(self, *, timeout_s: float) -> EngineSnapshot:
        """What it does: scheduler, KV cache, weights. What cannot be had is none, and `missing` says why."""
        deadline = _deadline(timeout_s)
        state = await self._state(deadline, timeout_s)
        async with vllm.session() as http:
            return await observe.snapshot(http, self.name, state, deadline=deadline)

    async def shutdown(self, *, timeout_s: float) -> None:
        """Have its calls finished, stop it, start no other (until `relight release`); return once it is gone.

        Raises NotYet where that takes longer; the wish stands all the same.
        """
        deadline = _deadline(timeout_s)
        state = await self._state(deadline, timeout_s)
        if state.phase not in outcome.ENDED:
            wish = DrainRequested(engine=self.name, incarnation=state.incarnation)
            await self._wished(wish, deadline, until=lambda now: now.phase in outcome.ENDED)

    async def restart(self, *, timeout_s: float) -> int:
        """Have it replaced, outside its restart budget; the incarnation that serves then.

        Raises NotYet where that takes longer (the wish stands all the same) or where it was ended instead,
        and UsageError where it is stopped or retired: `relight release` starts it.
        """
        deadline = _deadline(timeout_s)
        before = await self._state(deadline, timeout_s)
        if before.phase in outcome.ENDED:
            raise UsageError(f"{self.name} is {before.phase}: `relight release {self.name}` starts it")
        wish = RestartRequested(engine=self.name, incarnation=before.incarnation)
        after = await self._wished(wish, deadline, until=lambda now: _replaced(now, before))
        if after.phase in outcome.ENDED:
            why = after.retired_because or "an operator ended it"
            raise outcome.NotYet(f"{self.name} is {after.phase} and not restarted: {why}")
        return after.incarnation

    async def _wished(
        self,
        wish: DrainRequested | RestartRequested,
        deadline: float,
        *,
        until: Callable[[EngineState], bool],
    ) -> EngineState:
        async with open_bus(self._url) as bus:
            left_s = max(deadline - anyio.current_time(), 0.001)
            return await outcome.wished(bus.job(self._job), wish, until=until, within_s=left_s)

    async def _state(self, deadline: float, timeout_s: float) -> EngineState:
        with anyio.CancelScope(deadline=deadline):
            async with open_bus(self._url) as bus:
                return await self._engine(bus.job(self._job))
        raise BusUnavailable(f"the bus told nothing of {self.name} within {timeout_s:g} s")

    async def _engine(self, job: JobBus) -> EngineState:
        engines = (await job.snapshot()).engines
        if self.name not in engines:
            known = ", ".join(sorted(engines)) or "none"
            raise UsageError(f"job {self._job} has no engine {self.name!r}; its engines: {known}")
        return engines[self.name]


def _replaced(now: EngineState, before: EngineState) -> bool:
    serves = now.phase is Phase.SERVING and now.incarnation > before.incarnation
    return serves or now.phase in outcome.ENDED


def _deadline(timeout_s: float) -> float:
    return anyio.current_time() + _checked(timeout_s)


def _checked(timeout_s: object) -> float:
    """`timeout_s` where it is one; raises UsageError."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise UsageError(f"timeout_s {timeout_s!r} is no number of seconds")
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise UsageError(f"timeout_s {timeout_s!r} must be a finite number of seconds above 0")
    return float(timeout_s)
