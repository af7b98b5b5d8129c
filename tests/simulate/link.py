"""One process's way to the bus: what a redis client looks like to `events.bus`, over a network that may fail.

A command travels, is executed at one moment, and its reply travels back. A request or a reply may be lost or
late: then the caller's time-out ends the wait, and a late request is executed all the same.

Two waits are lazy, so that idle time costs nothing. A blocked reader of decisions returns empty each second
and then looks whether the bus is another one: it stays blocked until it would find that so. Pulses are
counted when they are read. Nobody can tell the difference.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from math import floor
from random import Random
from typing import Any

from redis import exceptions

from tests.simulate.flow import running
from tests.simulate.kernel import Kernel, Process, Task, parked
from tests.simulate.server import Entries, Server

LEAST_S, MOST_S = 0.0002, 0.002
"""How long a command takes."""
BLOCK_S = 1.0
"""How often a blocked reader returns empty, by its own choice."""


class Weather:
    """Which of a link's commands go wrong: rates of each kind, 0 in good times."""

    def __init__(self) -> None:
        self.lost_request = 0.0
        self.lost_reply = 0.0
        self.slow = 0.0
        self.slow_s = 4.0
        """Longest delay of a slow command."""
        self.doubled = 0.0
        """Plain appends that stand in the stream twice."""
        self.calm = True

    def still(self) -> None:
        self.lost_request = self.lost_reply = self.slow = self.doubled = 0.0
        self.calm = True


class Network:
    """The server, all links to it, and who is blocked on it."""

    def __init__(self, kernel: Kernel, server: Server, random: Random) -> None:
        self.kernel = kernel
        self.server = server
        self.random = random
        self.up = True
        self.well_since = 0.0
        """Since when the server could be reached, short breaks aside."""
        self.weather = Weather()
        self.struck: Callable[[str], object] = lambda kind: None
        """Told of each command that went wrong."""
        self.links: dict[Link, None] = {}
        self._blocked: dict[str, list[Blocked]] = {}
        self._due: dict[str, None] = {}
        self._watching: dict[str, list[tuple[Task, int, float, float]]] = {}
        server.added = self._added
        server.touched = self._touched

    # --- blocked readers ---------------------------------------------------------------------------

    def block(self, reader: "Blocked") -> None:
        self._blocked.setdefault(reader.stream, []).append(reader)

    def _added(self, stream: str, entry_id: str, fields: dict[str, str]) -> None:
        if stream in self._blocked and stream not in self._due:
            self._due[stream] = None
            self.kernel.soon(self._serve, stream)

    def _serve(self, stream: str) -> None:
        del self._due[stream]
        for reader in self._blocked.pop(stream, ()):
            reader.serve()

    def disturb(self) -> None:
        """The bus is another one than before: readers find out at their next look."""
        for stream in list(self._blocked):
            for reader in self._blocked.pop(stream):
                reader.look()
        for key in list(self._watching):
            self._touched(key)

    def reset(self, link: "Link | None" = None) -> None:
        """Connections break: of that link, or all."""
        for stream, readers in list(self._blocked.items()):
            kept = [reader for reader in readers if link is not None and reader.link is not link]
            broken = [reader for reader in readers if reader not in kept]
            self._blocked[stream] = kept
            for reader in broken:
                reader.fail()

    # --- who waits for a key -----------------------------------------------------------------------

    async def polled(self, key: str, every_s: float) -> None:
        """Sleep as one does who looks every so often whether the key is free, until it may be."""
        task, now = running(self.kernel), self.kernel.now
        self._watching.setdefault(key, []).append((task, task.turn, now, every_s))
        self._arm(key, task, task.turn, now, every_s)
        await parked()

    def _arm(self, key: str, task: Task, turn: int, since: float, every_s: float) -> None:
        """Look again when the key expires, on the poller's own grid."""
        if turn != task.turn:
            return
        left_s = self.server.expires_in_s(key)
        if left_s is None:
            self.kernel.at(_grid(since, self.kernel.now, every_s), task.wake, turn)
        else:
            when = _grid(since, self.kernel.now + left_s, every_s)
            self.kernel.at(when, self._arm, key, task, turn, since, every_s)

    def _touched(self, key: str) -> None:
        for task, turn, since, every_s in self._watching.pop(key, ()):
            self.kernel.at(_grid(since, self.kernel.now, every_s), task.wake, turn)
        if key.endswith(":state"):
            for stream in list(self._blocked):
                if stream.endswith(":decisions"):
                    for reader in self._blocked.pop(stream):
                        reader.look()


def _grid(since: float, when: float, every_s: float) -> float:
    """The first moment after `when` at which one looks who began at `since` and looks every so often."""
    return since + (floor(max(0.0, when - since) / every_s) + 1) * every_s


class Pulse:
    """A sign of life that advances each second while its process can say so."""

    def __init__(self, link: "Link", boot: str, seq: int) -> None:
        self.link = link
        self.boot = boot
        self._seq = seq
        self._since: float | None = link.network.kernel.now

    def seq(self) -> int:
        now = self.link.network.kernel.now
        if self._since is None or now < self._since:
            return self._seq
        return self._seq + 1 + int(now - self._since)

    def last_s(self) -> float | None:
        """Virtual time of the last beat; none while it stands still."""
        now = self.link.network.kernel.now
        if self._since is None or now < self._since:
            return None
        return self._since + int(now - self._since)

    def beating_s(self) -> float:
        """For how long it has advanced without a pause."""
        return 0.0 if self._since is None else max(0.0, self.link.network.kernel.now - self._since)

    def settle(self) -> None:
        """Look whether it beats now: to be called after whatever may have changed that."""
        beats = self.link.reaches and self.link.process.alive and not self.link.process.frozen
        if beats and self._since is None:
            network = self.link.network
            self._since = network.kernel.now + network.random.random()  # at its own next second
        elif not beats and self._since is not None:
            self._seq, self._since = self.seq(), None

    def text(self) -> str:
        return f'{{"boot":"{self.boot}","seq":{self.seq()}}}'


class Blocked:
    """An XREAD that waits in the server."""

    def __init__(self, link: "Link", task: Task, stream: str, after: str, count: int) -> None:
        self.link = link
        self.task = task
        self.turn = task.turn
        self.stream = stream
        self.after = after
        self.count = count
        self.since = link.network.kernel.now

    def serve(self) -> None:
        if not self.link.reaches:
            self.link.network.kernel.after(BLOCK_S, self.fail)
            return
        found = self.link.network.server.xread(self.stream, self.after, self.count)
        delay_s = self.link.travel_s()
        self.link.network.kernel.after(delay_s, self.task.wake, self.turn, {self.stream: found})

    def look(self) -> None:
        """Return empty at the next second."""
        kernel = self.link.network.kernel
        when = self.since + floor(kernel.now - self.since) + BLOCK_S
        kernel.at(when, self.task.wake, self.turn, {})

    def fail(self) -> None:
        kernel = self.link.network.kernel
        kernel.after(self.link.travel_s(), self.task.fail, self.turn, exceptions.ConnectionError("reset"))


class Link:
    """A process's connections to the bus."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.cut = False
        """No packet comes through."""
        self.well_since = 0.0
        """Since when its process ran and could reach the bus, short breaks aside."""
        self.weather = Weather()
        self.before: Callable[[str], object] | None = None
        """Asked before a script of that text is executed, once armed: it may kill the process."""
        self.behind: Callable[[str], object] | None = None
        """Asked after it was executed, before the reply."""
        self.delays: Callable[[str], float] | None = None
        """Asked how much longer a script of that text travels."""
        self.deaf_to: str | None = None
        """The reply to the next script of that text is lost."""
        self.lag_s = 0.0
        """How much longer each command travels."""
        network.links = {link: None for link in network.links if link.process.alive}
        network.links[self] = None

    @property
    def reaches(self) -> bool:
        return self.network.up and not self.cut

    def connect(self, url: str, **options: Any) -> "Client":
        return Client(self, options["socket_timeout"])

    def travel_s(self) -> float:
        return self.lag_s + LEAST_S + (MOST_S - LEAST_S) * self.network.random.random()

    def pulse(self, key: str, source: str, boot: str, seq: int) -> Pulse:
        """Begin to pulse as `source`."""
        beat = Pulse(self, boot, seq)
        self.network.server.pulses.setdefault(key, {})[source] = beat
        beat.settle()
        return beat

    async def call(self, timeout_s: float, do: Callable[[], Any], name: str = "") -> Any:
        """Have `do` executed on the server; raises redis' errors. `name`: the text of a script."""
        kernel = self.network.kernel
        call = _Call(self, running(kernel), timeout_s, do, name)
        if name and name == self.deaf_to and self.reaches:
            self.deaf_to, call.loses = None, True
            self.network.struck("lost-reply")
        if not self.reaches:
            kernel.after(timeout_s if self.cut else self.travel_s(), call.fails, "not reached")
        elif self.weather.calm and self.network.weather.calm:
            late_s = self.delays(name) if self.delays is not None and name else 0.0
            kernel.after(late_s + self.travel_s(), call.arrives)
        else:
            self._rough(call)
        return await parked()

    def _rough(self, call: "_Call") -> None:
        """One command in bad weather."""
        network, kernel, random = self.network, self.network.kernel, self.network.random
        for weather in (self.weather, network.weather):
            if random.random() < weather.lost_request:
                network.struck("lost-request")
                kernel.after(call.timeout_s, call.fails, "no answer")
                return
            if random.random() < weather.lost_reply:
                network.struck("lost-reply")
                call.loses = True
                break
            if random.random() < weather.slow:
                network.struck("slow")
                kernel.after(random.uniform(0.05, weather.slow_s), call.arrives)
                kernel.after(call.timeout_s, call.fails, "no answer")
                return
        kernel.after(self.travel_s(), call.arrives)


class _Call:
    """A command under way."""

    __slots__ = ("_do", "_link", "_name", "_task", "_turn", "loses", "timeout_s")

    def __init__(self, link: Link, task: Task, timeout_s: float, do: Callable[[], Any], name: str) -> None:
        self.timeout_s = timeout_s
        self.loses = False
        """Its reply is lost."""
        self._link = link
        self._task = task
        self._turn = task.turn
        self._do = do
        self._name = name

    def fails(self, why: str) -> None:
        self._task.fail(self._turn, exceptions.ConnectionError(why))

    def arrives(self) -> None:
        """The server executes it."""
        link, kernel = self._link, self._link.network.kernel
        if not link.reaches:
            kernel.after(self.timeout_s, self.fails, "reset")
            return
        if link.before is not None and self._name:
            link.before(self._name)
            if not link.process.alive:
                return
        try:
            reply = self._do()
        except exceptions.ResponseError as error:
            self._task.fail(self._turn, error)
            return
        if link.behind is not None and self._name:
            link.behind(self._name)
        if self.loses:
            kernel.after(self.timeout_s, self.fails, "no answer")
        else:
            self._task.wake(self._turn, reply)


class Client:
    """The part of `redis.asyncio.Redis` that `events.bus` uses."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._server = link.network.server

    def _call(self, do: Callable[[], Any]) -> Awaitable[Any]:
        return self._link.call(self._timeout_s, do)

    def register_script(self, text: str) -> "Script":
        return Script(self._link, self._timeout_s, text)

    def pipeline(self, *, transaction: bool) -> "Pipeline":
        return Pipeline(self._link, self._timeout_s)

    async def xread(self, streams: dict[str, str], *, count: int, block: int | None) -> Any:
        ((stream, after),) = streams.items()
        found: Entries = await self._call(partial(self._server.xread, stream, after, count))
        if found or block is None:
            return {stream: found}
        network, task = self._link.network, running(self._link.network.kernel)
        reader = Blocked(self._link, task, stream, after, count)
        if self._server.xread(stream, after, 1):  # added while its process was frozen
            reader.serve()
            return await parked()
        network.block(reader)
        if not stream.endswith(":decisions"):
            network.kernel.after(block / 1000.0, task.wake, task.turn, {})
        return await parked()

    async def xadd(self, key: str, fields: dict[str, str], **_: Any) -> Any:
        pairs = [text for pair in fields.items() for text in pair]
        weather = self._link.network.weather
        if weather.doubled and self._link.network.random.random() < weather.doubled:
            self._link.network.struck("doubled")
            await self._call(partial(self._server.do, "XADD", key, "*", *pairs))
        return await self._call(partial(self._server.do, "XADD", key, "*", *pairs))

    def xrevrange(self, key: str, *, count: int) -> Awaitable[Entries]:
        return self._call(partial(self._server.xrevrange, key, count))

    def __getattr__(self, command: str) -> Callable[..., Awaitable[Any]]:
        return lambda *args: self._call(partial(self._server.do, command.upper(), *args))

    async def aclose(self) -> None:
        return None


class Script:
    """A registered script. Its text stands for its digest."""

    def __init__(self, link: Link, timeout_s: float, text: str) -> None:
        self.sha = text
        self._link = link
        self._timeout_s = timeout_s

    def __call__(self, *, keys: list[str], args: list[str]) -> Awaitable[Any]:
        server = self._link.network.server
        return self._link.call(self._timeout_s, partial(server.eval, self.sha, keys, args), self.sha)


class Pipeline:
    """Commands that travel together and are executed one after the other."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._commands: list[Callable[[], Any]] = []
        self._scripts: list[str] = []

    async def __aenter__(self) -> "Pipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def evalsha(self, sha: str, count: int, *texts: str | int) -> None:
        keys, args = list(map(str, texts[:count])), list(map(str, texts[count:]))
        self._commands.append(partial(self._link.network.server.eval, sha, keys, args))
        self._scripts.append(sha)

    def hget(self, key: str, field: str) -> None:
        self._commands.append(partial(self._link.network.server.do, "HGET", key, field))

    def __getattr__(self, command: str) -> Callable[..., None]:
        def add(*args: Any, **options: Any) -> None:
            named = [word for name, value in options.items() for word in (name.upper(), value)]
            self._commands.append(partial(self._link.network.server.do, command.upper(), *args, *named))

        return add

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        name = self._scripts[0] if self._scripts else ""
        return await self._link.call(self._timeout_s, lambda: [do() for do in self._commands], name)
