"""A connection to the server: one client for commands, and one more for each blocked reader.

The library's own retries are off: a plain XADD that is retried after a lost reply stands in the stream
twice. A blocked reader's socket time-out is above its BLOCK, or it would break an idle stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from typing import Any, cast

import anyio
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from relight.events import keys
from relight.events.bus import urls
from relight.events.bus.clock import BusClock, monotonic_ms
from relight.events.bus.errors import shown, translated
from relight.events.bus.job import JobBus, Reader
from relight.events.bus.outages import Outages
from relight.events.bus.roll import Roll, stamp_of
from relight.events.bus.streams import BLOCK_MS
from relight.events.bus.survey import Survey
from relight.events.errors import BusUnavailable, UsageError
from relight.events.ids import JobName, job_name

log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 1.0
READ_MARGIN_S = 1.5

_UNNAMED: dict[str, Any] = (
    {"driver_info": None} if find_spec("redis.driver_info") else {"lib_name": None, "lib_version": None}
)
"""Or the library looks its own version up on disk for each connection (0.5 ms) and tells it in two calls."""

Connect = Callable[..., "redis.Redis"]
"""Makes a client; `urls.client`, or one of the same shape in tests."""


class Bus:
    """A server that was reached. Made by `open_bus`."""

    def __init__(self, url: str, connect: Connect) -> None:
        self.url = url
        self.clock = BusClock()
        self.outages = Outages()
        self._evicting = False
        self._connect = connect
        self._commands = self._client(COMMAND_TIMEOUT_S, connections=16)
        self._readers: list[redis.Redis] = []

    def _client(self, timeout_s: float, *, connections: int) -> "redis.Redis":
        return self._connect(
            self.url,
            protocol=2,
            decode_responses=True,
            encoding_errors="replace",  # an entry that is no text is to be parked, not to end its readers
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout_s,
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            max_connections=connections,
            **_UNNAMED,
        )

    def job(self, name: JobName) -> JobBus:
        """The part of the bus that is `name`'s."""
        return JobBus(name, bus=self, commands=self._commands)

    def roll(self) -> Roll:
        """Calls over many jobs at once."""
        return Roll(self, self._commands)

    def survey(self) -> Survey:
        """Reading many jobs at once, for those who only look."""
        return Survey(self, self._commands)

    def reader(self) -> Reader:
        """A client for one blocked reader, closed with the bus."""
        client = self._client(BLOCK_MS / 1000.0 + READ_MARGIN_S, connections=2)
        self._readers.append(client)
        return client

    @cached_property
    def readers(self) -> Reader:
        """One client for many blocked readers at once, each of them on a connection of its own while it
        reads. A client for each would cost a thousand of them 80 MiB and the garbage collector's time."""
        client = self._client(BLOCK_MS / 1000.0 + READ_MARGIN_S, connections=1 << 16)
        self._readers.append(client)
        return client

    @contextmanager
    def asking(self, call: str, *touched: str) -> Generator[None]:
        """Around one call (named for what it does and whose it is) that touches these keys: raises
        BusUnavailable, and has what keeps the bus from serving said once.
        """
        try:
            with translated(self.url, touched):
                yield
        except BusUnavailable as error:
            self.outages.failed(call, error)
            raise
        self.outages.served(call)

    async def tell_time(self) -> int:
        """Ask for bus time (ms) and set `clock` by it; raises BusUnavailable."""
        asked = monotonic_ms()
        with self.asking("time"):
            seconds, micros = await cast(Any, self._commands).time()
        now = int(seconds) * 1000 + int(micros) // 1000
        self.clock.set(now, asked_at_ms=asked)
        return now

    async def stamp(self) -> str:
        """What changes when the server is another one: run id and replication id, or `none`."""
        info = await self._info()
        if (evicts := self._evicts(info)) and not self._evicting:
            log.warning("%s", evicts)
        self._evicting = evicts is not None
        return stamp_of(info)

    async def _info(self) -> dict[str, Any]:
        with self.asking("info"):
            try:
                return cast(dict[str, Any], await cast(Any, self._commands).info())
            except redis.ResponseError as error:
                if str(error).lower().startswith("unknown command"):
                    return {}
                raise

    async def jobs(self) -> list[JobName]:
        """The names of all jobs that anyone has enrolled, less what is no name; raises BusUnavailable."""
        with self.asking("list jobs", keys.JOBS):
            names = await cast(Any, self._commands.smembers(keys.JOBS))
        found: list[JobName] = []
        for name in names:
            with suppress(UsageError):
                found.append(job_name(name))
        return sorted(found)

    async def enrol(self, job: JobName) -> None:
        """Add `job` to the set of jobs; raises BusUnavailable."""
        with self.asking("enrol", keys.JOBS):
            await cast(Any, self._commands.sadd(keys.JOBS, job))

    async def check(self) -> None:
        """Raise UsageError where the server is of no kind that keeps a job, BusUnavailable where absent."""
        if evicts := self._evicts(await self.check_kind()):
            raise UsageError(evicts)

    async def check_kind(self) -> dict[str, Any]:
        """`check` for those who only look: a server that may evict will do. What it says of itself."""
        await self.tell_time()
        info = await self._info()
        if info.get("cluster_enabled") == 1:
            raise UsageError(f"bus {shown(self.url)} is a Redis Cluster, which relight does not support yet")
        return info

    def _evicts(self, info: dict[str, Any]) -> str | None:
        """What to say of a server that may evict keys; a server that does not tell is trusted."""
        policy = info.get("maxmemory_policy", "noeviction")
        if policy == "noeviction":
            return None
        return (
            f"bus {shown(self.url)} may evict what stands on it (maxmemory-policy {policy}), and an evicted"
            " stream or state is lost: CONFIG SET maxmemory-policy noeviction, and in its file too"
        )

    async def close(self) -> None:
        await _closed(*self._readers, self._commands)


async def _closed(*clients: Reader) -> None:
    """Close connections also where the caller was cancelled."""
    with anyio.move_on_after(COMMAND_TIMEOUT_S, shield=True) as scope:
        for client in clients:
            try:
                await client.aclose()
            except asyncio.CancelledError:  # of redis-py's own task, in which anyio does not see its own
                if not scope.cancel_called:
                    raise


@asynccontextmanager
async def open_bus(url: str, *, connect: Connect = urls.client, reached: bool = True) -> AsyncGenerator[Bus]:
    """A bus at `url` (`redis://HOST:PORT`, `rediss://…`, `unix://…`, `redis+sentinel://…`: see `urls`).

    `reached`: fail now where the server does not answer (BusUnavailable) or is not supported (UsageError);
    otherwise the first command finds out.
    """
    bus = Bus(url, connect)
    try:
        if reached:
            with bus.outages.left_to_the_caller():
                await bus.check()
        yield bus
    finally:
        await bus.close()
