"""Sentinel: a client of whatever server is the primary at the moment.

Every new connection asks the Sentinels. One that was cut off for a while may still name the old primary, so
the newest answer (the highest `config-epoch`) of more than half of them counts; where fewer answer, what
they say. The server's stamp changes with the primary: that is all the rest of relight needs to see.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import anyio
import redis.asyncio as redis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff

from relight.events.bus.connections import tell_losses

ASK_S = 0.5
"""Longest wait for a Sentinel: it answers within a millisecond, or its host is down."""


class Primary(redis.Redis):
    """A client of the primary; closes what it asked the Sentinels with."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await cast(Any, self.connection_pool).sentinel_manager.aclose()


class Sentinels(Sentinel):
    """All of them are asked at once, so that one that hangs holds nobody up."""

    def __init__(self, addresses: Sequence[tuple[str, int]], options: Mapping[str, Any]) -> None:
        cast(Any, super()).__init__(addresses, sentinel_kwargs=options)
        for asked in self.sentinels:
            tell_losses(asked)
        self.addresses = ", ".join(f"{host}:{port}" for host, port in addresses)

    async def aclose(self) -> None:
        for asked in self.sentinels:
            await asked.aclose()

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """The primary's address; raises MasterNotFoundError, a ConnectionError."""
        answers: list[dict[str, Any] | None] = []
        failures: dict[str, None] = {}
        enough = len(self.sentinels) // 2 + 1

        async with anyio.create_task_group() as tasks:

            async def ask(asked: Any) -> None:
                try:
                    answers.append((await asked.sentinel_masters()).get(service_name))
                except (exceptions.RedisError, OSError) as error:
                    failures[str(error)] = None
                if len(answers) >= enough:
                    tasks.cancel_scope.cancel()

            for asked in self.sentinels:
                tasks.start_soon(ask, asked)

        known = [answer for answer in answers if answer is not None]
        primary = max(known, key=lambda answer: int(answer["config-epoch"]), default=None)
        if (
            primary is None or not self.check_master_state(primary, service_name)  # pyright: ignore[reportUnknownMemberType]
        ):
            raise MasterNotFoundError(self._why_none(service_name, primary, answers, failures))
        return str(primary["ip"]), int(primary["port"])

    def _why_none(
        self,
        service: str,
        primary: dict[str, Any] | None,
        answers: Sequence[object],
        failures: Mapping[str, None],
    ) -> str:
        if primary is not None:
            return f"the primary of {service!r} is down and the Sentinels have not promoted another one yet"
        if answers:
            return f"the Sentinels {self.addresses} know no service {service!r}"
        return f"no Sentinel of {self.addresses} answers: {'; '.join(failures)}"


def primary(
    addresses: Sequence[tuple[str, int]],
    service: str,
    *,
    of_servers: Mapping[str, Any],
    of_sentinels: Mapping[str, Any],
) -> "redis.Redis":
    """A client that has not connected yet. Raises TypeError for options that connections do not have."""
    options = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": ASK_S,
        "socket_connect_timeout": ASK_S,
        **of_sentinels,
    }
    sentinels = Sentinels(addresses, options)
    return cast(
        "redis.Redis",
        cast(Any, sentinels).master_for(service, redis_class=Primary, socket_keepalive=True, **of_servers),
    )
