"""The bus server in memory: the commands that relight uses, and its Lua scripts run by a real Lua 5.1.

What the scripts do is therefore not modelled: only strings with an expiry, hashes, sets and streams are, as
Redis has them. A command is one atomic step at the server's own time. The server can be emptied, restarted,
or replaced by an older copy of itself, as a fail-over to a lagging replica does.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from lupa.lua51 import LuaRuntime

from tests.simulate.flow import START_MS
from tests.simulate.kernel import Kernel

NODE = 100
"""Entries that a stream frees at once: `XTRIM ~` drops whole nodes only."""

Fields = dict[str, str]
Entries = list[tuple[str, Fields]]
_END = (2**63, 0)


class Stream:
    """Entries in the order of their ids; those before `first` are trimmed."""

    def __init__(self) -> None:
        self.ids: list[tuple[int, int]] = []
        self.entries: Entries = []
        self.last = (0, 0)
        self.gone = (0, 0)
        """The last one that was trimmed."""

    def add(self, ms: int, fields: Fields) -> str:
        last = self.last
        self.last = (ms, 0) if ms > last[0] else (last[0], last[1] + 1)
        entry_id = f"{self.last[0]}-{self.last[1]}"
        self.ids.append(self.last)
        self.entries.append((entry_id, fields))
        return entry_id

    def after(self, entry_id: str, count: int) -> Entries:
        at = bisect_right(self.ids, position(entry_id))
        return self.entries[at : at + count]

    def trim(self, keep: int) -> int:
        gone = max(0, len(self.ids) - keep) // NODE * NODE
        self.gone = self.ids[gone - 1] if gone else self.gone
        del self.ids[:gone], self.entries[:gone]
        return gone

    def copy(self) -> "Stream":
        twin = Stream()
        twin.ids, twin.entries, twin.last = list(self.ids), list(self.entries), self.last
        twin.gone = self.gone
        return twin


def position(entry_id: str) -> tuple[int, int]:
    ms, _, serial = entry_id.partition("-")
    return int(ms), int(serial or 0)


class Data:
    """Everything that a server holds."""

    def __init__(self) -> None:
        self.strings: dict[str, tuple[str, float]] = {}
        """Value, and the server's time (ms) at which it expires."""
        self.hashes: dict[str, Fields] = {}
        self.streams: dict[str, Stream] = {}
        self.sets: dict[str, dict[str, None]] = {}

    def copy(self) -> "Data":
        twin = Data()
        twin.strings = dict(self.strings)
        twin.hashes = {key: dict(value) for key, value in self.hashes.items()}
        twin.streams = {key: value.copy() for key, value in self.streams.items()}
        twin.sets = {key: dict(value) for key, value in self.sets.items()}
        return twin


class Server:
    """The server that the bus address leads to."""

    def __init__(self, kernel: Kernel) -> None:
        self.data = Data()
        self.life = 0
        """Counts servers and restarts: it makes the run id."""
        self.replication = 0
        self.clock_ms = 0.0
        """How far its clock is from virtual time."""
        self.added: Callable[[str, str, Fields], object] = _nobody
        """Told of each new entry: stream, id, fields."""
        self.touched: Callable[[str], object] = _nobody
        """Told of a key whose being there has changed: an expiring string, or a state that is born."""
        self.ran: Callable[[str, list[str], list[str], Any], object] = _nobody
        """Told of each script that was executed: its text, keys, arguments and reply."""
        self.pulses: dict[str, dict[str, Any]] = {}
        """The `pulse` hashes, whose texts are made when they are read."""
        self._kernel = kernel
        self._lua = LuaRuntime()
        self._redis = self._lua.table(call=self._call)
        self._scripts: dict[str, Any] = {}

    # --- what happens to it ------------------------------------------------------------------------

    def restart(self) -> None:
        """All of its data is there again under another run id."""
        self.life += 1

    def replace(self, data: Data, *, clock_ms: float) -> None:
        """Another server with older data stands in its place."""
        self.life += 1
        self.replication += 1
        self.data, self.clock_ms = data, clock_ms

    def empty(self) -> None:
        self.data = Data()

    # --- commands ----------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return START_MS + int(self._kernel.now * 1000.0 + self.clock_ms)

    def eval(self, script: str, keys: list[str], args: list[str]) -> Any:
        """Run one of the scripts; raises ResponseError where Redis would."""
        compiled = self._scripts.get(script)
        if compiled is None:
            compiled = self._lua.eval(f"function(redis, KEYS, ARGV)\n{script}\nend")
            self._scripts[script] = compiled
        table = self._lua.table
        reply = compiled(self._redis, table(*keys), table(*args))
        if not isinstance(reply, (int, float, str)):
            reply = list(reply.values())
        self.ran(script, keys, args, reply)
        return reply

    def _call(self, command: str, *args: Any) -> Any:
        """`redis.call`: as `do`, with the replies that Lua gets."""
        reply = self.do(command, *args)
        if reply is None:
            return False
        if isinstance(reply, list):
            return self._lua.table(*(False if each is None else each for each in reply))
        return reply

    def do(self, command: str, *args: Any) -> Any:
        return _COMMANDS[command](self, *args)

    def get(self, key: str) -> str | None:
        held = self.data.strings.get(key)
        if held is None or held[1] <= self.now_ms():
            return None
        return held[0]

    def expires_in_s(self, key: str) -> float | None:
        """Seconds until the key expires; none where it is not there."""
        held = self.data.strings.get(key)
        if held is None or held[1] <= self.now_ms():
            return None
        return (held[1] - START_MS - self.clock_ms) / 1000.0 - self._kernel.now

    def _set(self, key: str, value: str, *options: str) -> str:
        until = self.now_ms() + float(options[1]) if options else float("inf")
        fresh = self.get(key) is None
        self.data.strings[key] = (value, until)
        if fresh:
            self.touched(key)
        return "OK"

    def _del(self, key: str) -> int:
        there = self.data.strings.pop(key, None) is not None
        self.touched(key)
        return int(there)

    def _hset(self, key: str, *pairs: str) -> int:
        found = self.data.hashes.get(key)
        if found is None:
            found = self.data.hashes[key] = {}
            self.touched(key)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(pairs) // 2

    def _hdel(self, key: str, *fields: str) -> int:
        found: dict[str, Any] = self.pulses.get(key) or self.data.hashes.get(key, {})
        return sum(found.pop(field, None) is not None for field in fields)

    def _hgetall(self, key: str) -> Fields:
        pulses = self.pulses.get(key)
        if pulses is not None:
            return {source: pulse.text() for source, pulse in pulses.items()}
        return dict(self.data.hashes.get(key, {}))

    def _xadd(self, key: str, _star: str, *pairs: str) -> str:
        stream = self.data.streams.get(key)
        if stream is None:
            stream = self.data.streams[key] = Stream()
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        entry_id = stream.add(self.now_ms(), fields)
        self.added(key, entry_id, fields)
        return entry_id

    def xread(self, key: str, after: str, count: int) -> Entries:
        stream = self.data.streams.get(key)
        return stream.after(after, count) if stream is not None else []

    def _xrange(self, key: str, start: str, _end: str, _count: str, count: float) -> list[Any]:
        found = self.xread(key, start.removeprefix("("), int(count))
        return list(found) if start.startswith("(") else self.at(key, start)

    def at(self, key: str, entry_id: str) -> list[Any]:
        """The one entry with this id, if it stands."""
        stream, wanted = self.data.streams.get(key), position(entry_id)
        at = bisect_left(stream.ids, wanted) if stream is not None else 0
        return [stream.entries[at]] if stream is not None and stream.ids[at : at + 1] == [wanted] else []

    def xrevrange(self, key: str, count: int) -> Entries:
        stream = self.data.streams.get(key)
        return list(reversed(stream.entries[-count:])) if stream is not None else []

    def _xlen(self, key: str) -> int:
        stream = self.data.streams.get(key)
        return len(stream.ids) if stream is not None else 0

    def _xtrim(self, key: str, _maxlen: str, _about: str, keep: float) -> int:
        stream = self.data.streams.get(key)
        return stream.trim(int(keep)) if stream is not None else 0

    def _time(self) -> list[str]:
        now = START_MS * 1000 + int(self._kernel.now * 1e6 + self.clock_ms * 1000.0)
        return [str(now // 1_000_000), str(now % 1_000_000)]

    def info(self) -> dict[str, Any]:
        return {"run_id": f"run-{self.life}", "master_replid": f"repl-{self.replication}"}


def _nobody(*_: Any) -> None:
    return None


_COMMANDS: dict[str, Callable[..., Any]] = {
    "DEL": Server._del,
    "GET": Server.get,
    "HDEL": Server._hdel,
    "HGET": lambda server, key, field: server.data.hashes.get(key, {}).get(field),
    "HGETALL": Server._hgetall,
    "HMGET": lambda server, key, *fields: [server.data.hashes.get(key, {}).get(field) for field in fields],
    "HSET": Server._hset,
    "INFO": Server.info,
    "SADD": lambda server, key, *members: server.data.sets.setdefault(key, {}).update(dict.fromkeys(members)),
    "SET": Server._set,
    "SMEMBERS": lambda server, key: set(server.data.sets.get(key, {})),
    "TIME": Server._time,
    "XADD": Server._xadd,
    "XLEN": Server._xlen,
    "XRANGE": Server._xrange,
    "XREAD": Server.xread,
    "XREVRANGE": Server.xrevrange,
    "XTRIM": Server._xtrim,
}
