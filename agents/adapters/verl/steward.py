"""The steward: what verl takes for a replica's server, one actor that outlives every incarnation behind it.

It fills a slot of the node's agent. When the agent asks, it makes a new server actor in the replica's bundles
(on the same node, with the same devices), marked as the agent wants it, and reports its pid. Calls go through
to the incarnation of the moment; a generation whose incarnation dies is answered as aborted, with the tokens
that the ledger has of it, or as complete where only its answer was lost. What a death cut off is answered
once no route leads to it any more: whoever asks again at once would meet the same death again. Nothing here
is started but on the agent's order: Ray restarts neither actor.
"""

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from relight.agents.adapters.verl import answers, ledger, settings
from relight.agents.adapters.verl.bundle import Bundle, Life
from relight.agents.adapters.verl.slot import Slot, take, wanted_again
from relight.agents.adapters.verl.theirs import theirs
from relight.agents.node import config
from relight.agents.node.delegated.application import Order, Started
from relight.events.errors import RelightError
from relight.events.ids import EngineName

log = logging.getLogger(__name__)

T = TypeVar("T")

GONE_S = 30.0
"""Longest wait for the proof that an incarnation is gone whose death a call has met. Without an agent it does
not come, and the call is answered without it."""
PAUSE_S = 0.5
"""Before a call that met no engine is answered: whoever sends it here has not read what is routed now."""

NOTHING = ("abort_all_requests", "resume_engine_generation", "open_submission_gate", "resume_generation")
MEMORY = ("wait_for_requests_to_drain", "release_kv_cache", "resume_kv_cache", "sleep", "wake_up")
IDLE = (*NOTHING, *MEMORY)
"""Calls about running requests and caches: done at once where no engine is there. A sync makes them of every
member, and one that has died in it must not break those of the others."""


class NoEngine(RelightError):
    """The incarnation is gone and its replacement is not there yet."""


class Steward:
    """As verl's server class to a replica; `steward_class` adds what that class has besides."""

    server: Any
    """The actor class of incarnations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments of verl's own server class."""
        self._settings = settings.of(kwargs["config"])
        self._bundle = Bundle(self.server, args, kwargs)
        self._slot: Slot | None = None
        self._life: Life | None = None
        self._taking = asyncio.Lock()
        self._started = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- what verl asks of a server while it launches a replica ----------------------------------------

    async def get_master_address(self) -> tuple[str, int, int]:
        """Only replicas of several nodes use it."""
        return theirs("ray").util.get_node_ip_address(), 0, 0

    async def launch_server(self, **_: Any) -> None:
        """Fill a slot; return once its first incarnation serves. Raises UsageError, TimeoutError."""
        await self.relight_engine()
        try:
            await asyncio.wait_for(self._started.wait(), self._settings.start_s)
        except TimeoutError:
            raise TimeoutError(
                f"{await self.relight_engine()} was not started within start_s={self._settings.start_s:g} s;"
                f" `relight explain` tells what it waits for. {self._bundle.failure}"
            ) from None

    async def get_server_address(self) -> tuple[str, int]:
        life = self._serving()
        return life.host, life.port

    # --- what relight asks -----------------------------------------------------------------------------

    async def relight_engine(self) -> EngineName:
        """The name of the slot that it fills."""
        async with self._taking:
            if self._slot is None:
                self._loop = asyncio.get_running_loop()
                self._slot = await asyncio.to_thread(take, self._settings, self._start, ended=self._ended)
                await wanted_again(self._settings, self._slot.engine)
        return self._slot.engine

    async def relight_incarnation(self) -> int:
        """0 where none is there."""
        return self._life.incarnation if self._life is not None else 0

    # --- generations -----------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Any, sampling_params: Mapping[str, Any], request_id: str, **kwargs: Any
    ) -> Any:
        """verl's TokenOutput. Raises what the engine raises for a wrong request, and for nothing else."""
        life = self._life
        if life is None or life.died:
            await (asyncio.sleep(PAUSE_S) if life is None else self._gone(life))
            return answers.nothing()
        routed = getattr(self._bundle.config, "enable_rollout_routing_replay", False)
        exceptions = theirs("ray").exceptions
        try:
            answer = await life.server.generate.remote(prompt_ids, sampling_params, request_id, **kwargs)
            life.died = life.died or answers.died(answer)
        except exceptions.RayActorError as error:
            log.warning("the server died under a call request=%s error=%s", request_id, type(error).__name__)
            life.died = life.died or not isinstance(error, exceptions.ActorUnavailableError)
            kept = await self._kept_of(life, request_id)
            answer = answers.lost(kept, steps=life.steps, routed=routed)
        if answers.died(answer):
            await self._gone(life)
        return answers.continuable(answer, sampling_params, routed=routed)

    async def _gone(self, life: Life) -> None:
        """Return when nothing is sent to a dead incarnation any more."""
        try:
            await asyncio.wait_for(life.gone.wait(), GONE_S if life.died else PAUSE_S)
        except TimeoutError:
            log.warning(
                "not proven gone in time: calls may be sent to it still incarnation=%d", life.incarnation
            )

    async def _kept_of(self, life: Life, request_id: str) -> ledger.Kept:
        """Of one call; the file of a death is read once for all of them."""
        if life.kept is None:
            life.kept = asyncio.ensure_future(asyncio.to_thread(ledger.read, life.ledger))
        try:
            kept = (await asyncio.shield(life.kept)).get(request_id, ledger.Kept())
            # Of a name that is used again it may be the turn before, whose answer has arrived.
            again = kept.ended and getattr(self._bundle.config, "full_determinism", False)
            return ledger.Kept() if again else kept
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("what a dead engine had made cannot be read error=%s", error)
            return ledger.Kept()

    async def set_global_steps(self, global_steps: int) -> None:
        """The version as verl counts it, of the incarnation that has got it."""
        life = self._serving()
        await life.server.set_global_steps.remote(global_steps)
        life.steps = global_steps

    def _serving(self) -> Life:
        if self._life is None:
            name = self._slot.engine if self._slot else "this replica"
            raise NoEngine(f"{name} has no engine at the moment. {self._bundle.failure}")
        return self._life

    # --- incarnations, in threads of the agent's delegate ------------------------------------------------

    def _start(self, order: Order) -> Started:
        life = self._bundle.start(order, ledger=self._ledger_of(order))
        self._soon(self._begin, life)
        return Started([life.pid], port=life.port, host=life.host)

    def _ledger_of(self, order: Order) -> Path:
        """Where the incarnation writes: beside what the agent keeps, so no other slot's does. The last one's
        may be read still; older ones go.
        """
        folder = config.load(Path(self._settings.node_file)).state_path / "verl" / order.engine
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.glob("*.ledger"):
            if int(path.stem) < order.incarnation - 1:
                path.unlink(missing_ok=True)
        return folder / f"{order.incarnation}.ledger"

    def _begin(self, life: Life) -> None:
        if self._life is not None:
            self._life.gone.set()  # nobody starts one beside it
        self._life = life
        self._started.set()

    def _ended(self, engine: str, incarnation: int, why: str) -> None:
        log.info("proven gone engine=%s.%d why=%s", engine, incarnation, why)
        self._soon(self._end, incarnation)

    def _soon(self, do: Callable[[T], None], what: T) -> None:
        assert self._loop is not None, "the slot was taken in it"
        self._loop.call_soon_threadsafe(do, what)

    def _end(self, incarnation: int) -> None:
        life = self._life
        if life is not None and life.incarnation == incarnation:
            self._life = None
            life.gone.set()


def steward_class(server: Any) -> Any:
    """The steward of server class `server`: its public calls go through to the incarnation of the moment."""
    calls = [name for name, _ in inspect.getmembers(server, inspect.isfunction) if name[0] != "_"]
    passed = {name: _passed_on(name) for name in calls if not hasattr(Steward, name)}
    return type("Steward", (Steward,), {"server": server, "__module__": __name__, **passed})


def _passed_on(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: Steward, *args: Any, **kwargs: Any) -> Any:
        try:
            life = self._serving()  # pyright: ignore[reportPrivateUsage]
            return await getattr(life.server, name).remote(*args, **kwargs)
        except (theirs("ray").exceptions.RayActorError, NoEngine) as error:
            if name not in IDLE:
                raise
            log.info("nothing to do, the engine is gone call=%s error=%s pid=%d", name, error, os.getpid())
            return {}

    call.__name__ = name
    return call
