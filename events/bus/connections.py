"""Connections that tell their loss as what it is.

A transport that was reset by its peer while nobody read from it fails in a way of its own when it is written
to: RuntimeError on uvloop, TypeError or AttributeError on CPython 3.12 to 3.14.0. redis-py 8.1 lets these
through (redis/redis-py#4287), and whoever takes ConnectionError for an outage would end by them.
"""

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import redis.asyncio as redis
from redis.exceptions import ConnectionError as Lost

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection
else:
    AbstractConnection = object


class _Telling(AbstractConnection):
    """In front of one of the library's connections."""

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        try:
            await super().send_packed_command(command, check_health)
        except (RuntimeError, TypeError, AttributeError) as error:
            raise Lost(f"the connection was lost before it was written to: {error}") from error


@cache
def telling(kind: type[Any]) -> type[Any]:
    """`kind`, a connection of the library's, with every loss a ConnectionError."""
    return type(f"Telling{kind.__name__}", (_Telling, kind), {})


def tell_losses(client: "redis.Redis") -> None:
    """Have the connections of `client`, which has none yet, tell their loss."""
    pool = cast(Any, client.connection_pool)
    pool.connection_class = telling(pool.connection_class)
