"""A connection that was reset while nobody read from it: an outage like any other, on either event loop."""

from typing import Any

import anyio
import pytest
import redis.asyncio as redis
from redis.exceptions import ConnectionError as Lost

from relight.events.bus.client import Bus, open_bus
from relight.events.bus.connections import telling
from relight.events.bus.embedded import Embedded
from relight.events.errors import BusUnavailable
from tests.orchestrator_support import until
from tests.slow_link import link_to

pytestmark = pytest.mark.anyio

TIMES = 20
WITHIN_S = 60.0
LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": uvloop}), id="uvloop" if uvloop else "asyncio")
    for uvloop in (False, True)
]


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_a_reset_in_between_two_calls_is_told_as_the_bus_being_away(server: Embedded) -> None:
    port = int(server.url.rpartition(":")[2])
    async with link_to(port) as link, open_bus(f"redis://127.0.0.1:{link.port}") as bus:
        away = 0
        for _ in range(TIMES):
            await until(lambda: _serves(bus), within_s=WITHIN_S)
            link.reset()
            for _ in range(3):  # until the loop has heard of it
                await anyio.lowlevel.checkpoint()
            away += not await _serves(bus)
        assert away, "no reset fell between two calls"
        await until(lambda: _serves(bus), within_s=WITHIN_S)


async def _serves(bus: Bus) -> bool:
    try:
        await bus.tell_time()
    except BusUnavailable:
        return False
    return True


@pytest.mark.parametrize("error", [RuntimeError, TypeError, AttributeError])
async def test_whatever_a_dead_transport_raises_is_a_lost_connection(error: type[Exception]) -> None:
    class Dead(redis.Connection):
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            raise error("'NoneType' object is not callable")

    with pytest.raises(Lost, match="lost before it was written to: 'NoneType'"):
        await telling(Dead)().send_packed_command(b"PING")
