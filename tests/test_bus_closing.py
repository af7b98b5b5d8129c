"""Closing connections is bounded, on a machine so busy that every time-out runs out at once too."""

import asyncio
from typing import Any, cast

import anyio
import pytest

from relight.events.bus import client

pytestmark = pytest.mark.anyio


class Slow:
    """Closes as redis-py does when its own time-out and the caller's end together: with a cancellation that
    no longer says whose it is."""

    def __init__(self) -> None:
        self.asked = False

    async def aclose(self) -> None:
        self.asked = True
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            raise asyncio.CancelledError from None


async def test_a_close_that_takes_too_long_is_given_up_and_nobody_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "COMMAND_TIMEOUT_S", 0.01)
    slow = Slow()
    await client._closed(cast(Any, slow))
    assert slow.asked
    await anyio.lowlevel.checkpoint()
