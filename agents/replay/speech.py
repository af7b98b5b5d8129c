"""How an engine is asked, apart from what: a `Generation` goes through attempts, a `Speech` words each."""

from typing import NamedTuple, Protocol

import aiohttp

from relight.agents.replay.ledger import Ask
from relight.agents.replay.limits import Call
from relight.agents.replay.route import Key
from relight.agents.replay.stream import Flight


class Errand(NamedTuple):
    """One attempt's request: to whom, and what for."""

    http: aiohttp.ClientSession
    address: str
    key: Key
    """Whose address that is."""
    call: Call
    ask: Ask
    request_id: str
    after_s: float
    """How long it is put off, so that replays do not come all at once."""


class Speech(Protocol):
    """A route of the engine and its words."""

    def flight(self, *, idle_s: float | None) -> Flight:
        """What the next attempt is sent and read with."""
        ...

    async def send(self, flight: Flight, errand: Errand) -> None:
        """Have it generate; raises what `Flight.open` raises."""
        ...

    def names(self, request_id: str) -> list[str]:
        """What the engine may call a request of that id."""
        ...
