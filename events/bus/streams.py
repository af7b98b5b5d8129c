"""Reading streams: one shape for replies, whatever the server and the protocol."""

from collections.abc import Mapping
from typing import Any, cast

import redis.asyncio as redis

from relight.events import codec
from relight.events.envelope import Entry
from relight.events.ids import EntryId

BLOCK_MS = 1000
"""Longest wait of one XREAD: a deleted stream never wakes its readers, so they look up once a second."""


def position(entry_id: EntryId) -> tuple[int, int]:
    """What orders entry ids; raises ValueError for what is none."""
    milliseconds, _, serial = entry_id.partition("-")
    return int(milliseconds), int(serial)


async def read(
    client: "redis.Redis", stream: str, *, after: EntryId, block_ms: int | None, count: int
) -> list[Entry]:
    """Up to `count` entries after `after`; waits up to `block_ms`, not at all where it is None."""
    return (await read_several(client, {stream: after}, block_ms=block_ms, count=count)).get(stream, [])


async def read_several(
    client: "redis.Redis", after: Mapping[str, EntryId], *, block_ms: int | None, count: int
) -> dict[str, list[Entry]]:
    """`read` of several streams of one slot at one moment; streams with nothing new are left out."""
    block = None if block_ms is None else max(1, min(block_ms, BLOCK_MS))
    reply: Any = await cast(Any, client).xread(dict(after), count=count, block=block)
    if not reply:
        return {}
    streams: Any = reply.items() if hasattr(reply, "items") else reply
    return {
        stream: [codec.entry(entry_id, fields) for entry_id, fields in _flat(entries)]
        for stream, entries in streams
    }


async def last(client: "redis.Redis", stream: str, *, count: int) -> list[Entry]:
    """The newest `count` entries, oldest first."""
    entries = await cast(Any, client).xrevrange(stream, count=count)
    return [codec.entry(entry_id, fields) for entry_id, fields in reversed(entries)]


def _flat(entries: Any) -> Any:
    """RESP3 wraps a stream's entries in one more list than RESP2 does."""
    if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], (list, tuple)):
        return entries[0]
    return entries
