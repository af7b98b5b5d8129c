"""A connection to the server: one client for commands, and one more for each blocked reader.

The library's own retries are off: a plain XADD that is retried after a lost reply stands in the stream
twice. A blocked reader's socket time-out is above its BLOCK, or it would break an idle stream.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import anyio
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from relight.events import keys
from relight.events.bus.clock import BusClock, monotonic_ms
from relight.events.bus.errors import shown, translated
from relight.events.bus.job import JobBus, Reader
from relight.events.bus.streams import BLOCK_MS
from relight.events.errors import UsageError
from relight.events.ids import JobName, job_name

COMMAND_TIMEOUT_S = 1.0
READ_MARGIN_S = 1.5

Connect = Callable[..., "redis.Redis"]
"""Makes a client; `redis.asyncio.Redis.from_url`, or one of the same shape in tests."""


class Bus:
    """A server that was reached. Made by `open_bus`."""

    def __init__(self, url: str, connect: Connect) -> None:
        self.url = url
        self.clock = BusClock()
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
        )

    def job(self, name: JobName) -> JobBus:
        """The part of the bus that is `name`'s."""
        return JobBus(name, bus=self, commands=self._commands)

    def reader(self) -> Reader:
        """A client for one blocked reader, closed with the bus."""
        client = self._client(BLOCK_MS / 1000.0 + READ_MARGIN_S, connections=2)
        self._readers.append(client)
        return client

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[Reader]:
        """A client for one blocked reader, closed at the end of the block."""
        client = self.reader()
        try:
            yield client
        finally:
            self._readers.remove(client)
            await _closed(client)

    async def tell_time(self) -> int:
        """Ask for bus time (ms) and set `clock` by it; raises BusUnavailable."""
        asked = monotonic_ms()
        with translated(self.url):
            seconds, micros = await cast(Any, self._commands).time()
        now = int(seconds) * 1000 + int(micros) // 1000
        self.clock.set(now, asked_at_ms=asked)
        return now

    async def stamp(self) -> str:
        """What changes when the server is another one: run id and replication id, or `none`."""
        info = await self._info()
        if "run_id" not in info:
            return "none"
        return f"{info['run_id']}:{info.get('master_replid', '')}"

    async def _info(self) -> dict[str, Any]:
        try:
            with translated(self.url):
                return cast(dict[str, Any], await cast(Any, self._commands).info())
        except redis.ResponseError:
            return {}

    async def jobs(self) -> list[JobName]:
        """The names of all jobs that anyone has enrolled, less what is no name; raises BusUnavailable."""
        with translated(self.url):
            names = await cast(Any, self._commands.smembers(keys.JOBS))
        found: list[JobName] = []
        for name in names:
            with suppress(UsageError):
                found.append(job_name(name))
        return sorted(found)

    async def enrol(self, job: JobName) -> None:
        """Add `job` to the set of jobs; raises BusUnavailable."""
        with translated(self.url):
            await cast(Any, self._commands.sadd(keys.JOBS, job))

    async def check(self) -> None:
        """Raise UsageError where the server is of no supported kind, BusUnavailable where absent."""
        await self.tell_time()
        if (await self._info()).get("cluster_enabled") == 1:
            raise UsageError(f"bus {shown(self.url)} is a Redis Cluster, which relight does not support yet")

    async def close(self) -> None:
        await _closed(*self._readers, self._commands)


async def _closed(*clients: Reader) -> None:
    """Close connections also where the caller was cancelled."""
    with anyio.move_on_after(COMMAND_TIMEOUT_S, shield=True):
        for client in clients:
            await client.aclose()


def _from_url(url: str, **options: Any) -> "redis.Redis":
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    try:
        client = cast(Any, redis.Redis).from_url(url, **options)
        client.connection_pool.make_connection()  # options in the URL are looked at here
        return cast("redis.Redis", client)
    except (TypeError, ValueError) as error:
        raise UsageError(f"bus URL {shown(url)!r}: {error}") from error


@asynccontextmanager
async def open_bus(url: str, *, connect: Connect = _from_url, reached: bool = True) -> AsyncGenerator[Bus]:
    """A bus at `url` (`redis://HOST:PORT`, `rediss://…`, `unix://…`).

    `reached`: fail now where the server does not answer (BusUnavailable) or is not supported (UsageError);
    otherwise the first command finds out.
    """
    bus = Bus(url, connect)
    try:
        if reached:
            await bus.check()
        yield bus
    finally:
        await bus.close()
