"""Asking an engine for the drift at the seam, before it goes on after kept tokens."""

from typing import NamedTuple

import aiohttp

from relight.agents.replay import drift
from relight.agents.replay.aloft import Aloft
from relight.agents.replay.drift import Kept
from relight.agents.replay.limits import Call
from relight.agents.replay.request import headers_of, probe_of
from relight.agents.replay.stream import Rejected


class Seam(NamedTuple):
    """What the engine says of the kept tokens."""

    drift: float | None
    """In nats, at most; none where it does not tell."""
    too_far: str | None
    """Why they are not to be continued there; none where they may be."""


async def measured(
    aloft: Aloft, kept: list[Kept], call: Call, *, http: aiohttp.ClientSession, most: float
) -> Seam:
    """Have the engine of `aloft` score `kept`; over `most`, or without an answer to that, they are too far.

    Raises Interrupted and Overloaded as the attempt's own request does.
    """
    request_id = f"{aloft.request_id}-seam"
    body, headers = probe_of(call, aloft.ask, request_id), headers_of(call, request_id)
    try:
        answer = await aloft.flight.ask(http, aloft.boarded.route.address, body, headers)
        found = drift.largest(answer, kept)
    except (drift.Unmeasured, Rejected) as unmeasured:
        return Seam(None, f"drift at the seam: not measured: {unmeasured}")
    return Seam(found, f"drift at the seam: {found:.3g} is over {most:g}" if found > most else None)
