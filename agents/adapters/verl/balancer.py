"""verl's load balancer: an actor that gives each call a server which the orchestrator routes at that moment.

It keeps verl's whole protocol. Servers that verl names (at its making, by `add_servers`) are handles to send
calls to; whether one may be sent is the routes' matter. An empty pool makes calls wait, each for `wait_s` at
most. verl makes this class an actor; with coroutine methods its calls run side by side in one event loop.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import anyio

from relight.agents.adapters.verl import settings
from relight.agents.adapters.verl.pool import Pool, server_id
from relight.agents.replay.route import Wanted
from relight.agents.replay.routes import Change, Freed
from relight.agents.replay.waiting import Queue
from relight.events.bus.client import open_bus
from relight.events.bus.follow import Away, Decided, Event, Follower, Synced
from relight.events.errors import RelightError, UsageError
from relight.events.ids import EngineName, engine_name

log = logging.getLogger(__name__)

NONE_LEFT = "No available servers in load balancer"
"""verl's clients know an empty pool by these words."""
MEET_S = 30.0
"""For a new server to say which engine it is; it answers while it starts, too."""


class LoadBalancer:
    """As `router_class` of the router's YAML file."""

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """`servers`: handles by address; `config`: the whole file. Raises UsageError."""
        self._settings = settings.read(config, where="the router's YAML file")
        self._handles: dict[EngineName, Any] = {}
        self._unmet: dict[str, Any] = dict(servers)
        self._pool = Pool(self._handles.__contains__)
        self._queue = Queue(self._pool)
        self._synced = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._meeting = asyncio.Lock()

    # --- verl's protocol -----------------------------------------------------------------------------

    async def acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        """A server and its handle: the request's own as long as it is routed, else the least busy one.

        Raises RuntimeError where none is routed within `wait_s`.
        """
        with anyio.move_on_after(self._settings.wait_s):
            await self._ready()
            route = await self._queue.take(Wanted(session=request_id))
            return server_id(route.key), self._handles[route.key.engine]
        told = self._pool.blind or "the orchestrator routes none"
        raise RuntimeError(
            f"{NONE_LEFT}: job {self._settings.job} had no engine to send to for {self._settings.wait_s:g} s"
            f" ({told}); `relight explain` tells what its engines wait for"
        )

    async def require_acquire_fields(self) -> list[str]:
        """Routes depend on the request id alone."""
        return []

    async def require_release_fields(self) -> list[str]:
        """Calls are counted by server."""
        return []

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """A call has ended. Said of an incarnation that is gone it touches no later one."""
        self._pool.done(server_id)
        self._queue.serve()

    async def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Know these handles, by address. Raises UsageError for one that is no replica of relight's."""
        self._unmet.update(servers)
        await self._meet()
        self._queue.serve()

    async def remove_servers(self, server_ids: list[str]) -> None:
        """Give these no calls until they are added again; a replacement is another server."""
        await self._ready()
        for name in server_ids:
            if not self._pool.take_out(name):
                log.info("nothing to remove: no such server is routed server=%s", name)

    async def get_all_servers(self) -> list[str]:
        await self._ready()
        return list(self._pool.servers)

    async def get_status(self) -> dict[str, Any]:
        await self._ready()
        loads = self._loads()
        return {
            "servers": loads,
            "total_inflight": sum(loads.values()),
            "active_servers": len(loads),
            "registered_handles": sorted(self._handles),
            "waiting": len(self._queue),
            "versions": {name: str(route.version) for name, route in self._pool.servers.items()},
            "blind": self._pool.blind,
        }

    async def clear_sticky_cache(self) -> dict[str, Any]:
        return {"cleared_entries": self._pool.unstick(), "server_loads": self._loads()}

    async def get_total_inflight(self) -> int:
        return sum(self._loads().values())

    async def get_inflight_count(self, server_id: str) -> int:
        return self._loads().get(server_id, 0)

    def _loads(self) -> dict[str, int]:
        return {name: route.in_flight for name, route in self._pool.servers.items()}

    # --- the routes ----------------------------------------------------------------------------------

    async def _ready(self) -> None:
        """Return when the state has been read once. Raises what following it raised."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        await self._meet()
        if not self._synced.is_set():
            synced = asyncio.create_task(self._synced.wait())
            await asyncio.wait((synced, self._following), return_when=asyncio.FIRST_COMPLETED)
            synced.cancel()
        if self._following.done():
            self._following.result()

    async def _meet(self) -> None:
        """Ask each new handle which engine it is."""
        async with self._meeting:
            while self._unmet:
                address, handle = next(iter(self._unmet.items()))
                engine = await _engine_of(address, handle)
                self._handles[engine] = handle
                self._pool.put_back(engine)
                del self._unmet[address]

    async def _follow(self) -> None:
        async with open_bus(self._settings.bus_url, reached=False) as bus:
            follower = Follower(bus.job(self._settings.job))
            while True:
                self._take(await follower.next())

    def _take(self, event: Event) -> None:
        match event:
            case Synced(snapshot=snapshot, stamp=stamp):
                self._let_go(self._pool.read(snapshot, stamp=stamp))
                self._synced.set()
            case Decided(decision=decision):
                self._let_go(self._pool.apply(decision))
            case Away(reason=reason):
                self._pool.lose(reason)
                log.warning("the bus is away; going on with %d routes reason=%s", len(self._pool), reason)
            case _:
                return
        self._queue.serve()

    def _let_go(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Freed):
                asyncio.get_running_loop().call_later(change.after_s, self._pool.forget, change.route)


async def _engine_of(address: str, handle: Any) -> EngineName:
    try:
        with anyio.fail_after(MEET_S):
            return engine_name(await handle.relight_engine.remote())
    except AttributeError as error:
        raise UsageError(f"the server at {address} is no replica of relight's: {handle!r}") from error
    except TimeoutError as error:
        raise RelightError(f"the server at {address} did not say its engine within {MEET_S:g} s") from error
