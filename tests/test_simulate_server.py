"""The simulation's server beside a real one: both are told the same, and answer and hold the same."""

from random import Random
from typing import Any, Protocol

import pytest
import redis

from relight.events.bus import scripts
from relight.events.bus.embedded import Embedded
from relight.events.ids import JobName
from relight.events.keys import Keys
from tests.simulate.flow import START_MS
from tests.simulate.kernel import Kernel
from tests.simulate.server import Server, position

KEYS = Keys(JobName("job"))


class Serves(Protocol):
    """A server that can be told something."""

    def eval(self, script: str, keys: list[str], args: list[str]) -> Any: ...
    def stream(self, key: str) -> list[tuple[str, dict[str, str]]]: ...
    def hash(self, key: str) -> dict[str, str]: ...
    def string(self, key: str) -> str | None: ...


class Model:
    def __init__(self) -> None:
        self._kernel = Kernel()
        self._server = Server(self._kernel)

    def eval(self, script: str, keys: list[str], args: list[str]) -> Any:
        self._kernel.run(self._kernel.now + 0.002)
        return self._server.eval(script, keys, args)

    def stream(self, key: str) -> list[tuple[str, dict[str, str]]]:
        return self._server.xread(key, "0-0", 100_000)

    def hash(self, key: str) -> dict[str, str]:
        found: dict[str, str] = self._server.do("HGETALL", key)
        return found

    def string(self, key: str) -> str | None:
        return self._server.get(key)


class Real:
    def __init__(self, url: str) -> None:
        self._client: Any = redis.Redis.from_url(url, decode_responses=True, protocol=2)

    def eval(self, script: str, keys: list[str], args: list[str]) -> Any:
        return self._client.eval(script, len(keys), *keys, *args)

    def stream(self, key: str) -> list[tuple[str, dict[str, str]]]:
        return list(self._client.xrange(key))

    def hash(self, key: str) -> dict[str, str]:
        return dict(self._client.hgetall(key))

    def string(self, key: str) -> str | None:
        found: str | None = self._client.get(key)
        return found


class Side:
    """One of the two. Ids and epochs are its own, and compared by their order."""

    def __init__(self, server: Serves) -> None:
        self._server = server
        self._leases = ["0:nobody"]
        self._ids = ["0-0"]

    def take(self, holder: int) -> str:
        """Take the lease; whether it was free."""
        asked = [f"holder-{holder}", "60000", "0"]
        verdict, told = self._server.eval(scripts.TAKE, [KEYS.lease, KEYS.epoch, KEYS.state], asked)
        if verdict == "OK":
            self._leases.append(f"{told}:holder-{holder}")
        return str(verdict)

    def append(self, source: str, boot: str, install: str, first: int, count: int) -> Any:
        facts: list[str] = []
        for seq in range(first, first + count):
            facts += [str(seq), "4", "type", "x", "data", f"{source} {seq}"]
        return self._server.eval(scripts.APPEND, [KEYS.seen, KEYS.facts], [source, boot, install, *facts])

    def commit(self, back: int, before: int, decisions: int, cursor: int) -> tuple[str, int]:
        lease = self._lease(back)
        args = [lease, lease.partition(":")[0], str(before), str(before + 1)]
        args += [
            self._ids[min(cursor, len(self._ids) - 1)],
            "2",
            "meta",
            f"meta {before}",
            "1",
            "engine:gone",
        ]
        for number in range(decisions):
            args += ["4", "type", "y", "data", f"{before} {number}"]
        keys = [KEYS.lease, KEYS.state, KEYS.decisions]
        verdict, _, number, _ = self._server.eval(scripts.COMMIT, keys, args)
        return verdict, int(number)

    def renew(self, back: int) -> Any:
        return self._server.eval(scripts.RENEW, [KEYS.lease], [self._lease(back), "60000"])

    def release(self, back: int) -> Any:
        return self._server.eval(scripts.RELEASE, [KEYS.lease], [self._lease(back)])

    def trim(self, back: int, keep: int) -> Any:
        keys = [KEYS.lease, KEYS.state, KEYS.facts, KEYS.decisions]
        return self._server.eval(scripts.TRIM, keys, [self._lease(back), str(keep)])

    def forget(self, back: int, source: str) -> Any:
        seen = self._server.hash(KEYS.seen).get(source, "")
        keys = [KEYS.lease, KEYS.seen, KEYS.pulse]
        return self._server.eval(scripts.FORGET, keys, [self._lease(back), source, seen])

    def stands(self) -> Any:
        """Everything that stands on it."""
        streams = [self._server.stream(key) for key in (KEYS.facts, KEYS.decisions)]
        self._ids = ["0-0", *sorted((each for stream in streams for each, _ in stream), key=position)]
        entries = [[self._plain(fields) for _, fields in stream] for stream in streams]
        lease = self._plain({"lease": self._server.string(KEYS.lease) or ""})
        return entries, self._plain(self._server.hash(KEYS.state)), self._server.hash(KEYS.seen), lease

    def _lease(self, back: int) -> str:
        """The newest one, or one of before."""
        return self._leases[max(0, len(self._leases) - 1 - back)]

    def _plain(self, fields: dict[str, str]) -> dict[str, object]:
        epochs = [lease.partition(":")[0] for lease in self._leases]
        plain: dict[str, object] = {}
        for name, value in fields.items():
            if name in ("after", "cursor", "tail"):
                plain[name] = value == "0-0"
            elif value.partition(":")[0] in epochs:
                plain[name] = epochs.index(value.partition(":")[0])
            else:
                plain[name] = value
        return plain


def drawn(random: Random, commits: int) -> tuple[str, tuple[Any, ...]]:
    """What both are told next, after so many commits."""
    back = random.choice([0, 0, 0, 1])
    source, boot = f"agent/{random.randrange(2)}", f"boot-{random.randrange(2)}"
    return random.choice(
        [
            ("append", (source, boot, str(random.randrange(2)), random.randrange(5), random.randrange(3))),
            ("append", ("agent/0", "boot-0", "1", 10 * random.randrange(90), 60)),
            ("commit", (back, commits - random.randrange(2), random.randrange(60), random.randrange(2000))),
            ("commit", (0, commits, 1, 10_000)),
            ("take", (random.randrange(3),)),
            ("renew", (back,)),
            ("release", (back,)),
            ("trim", (back, 10)),
            ("forget", (back, source)),
        ]
    )


@pytest.mark.parametrize("seed", range(3))
def test_both_servers_answer_and_hold_the_same(server: Embedded, seed: int) -> None:
    random, sides, commits, trimmed = Random(seed), (Side(Model()), Side(Real(server.url))), 0, 0
    for _ in range(250):
        name, args = drawn(random, commits)
        said, real = (getattr(side, name)(*args) for side in sides)
        assert said == real, (name, args)
        assert sides[0].stands() == sides[1].stands()
        commits = said[1] if name == "commit" else commits
        trimmed += name == "trim" and said > 0
    assert commits > 5 and trimmed > 0


def test_a_lease_expires_and_ids_never_go_back_with_the_clock() -> None:
    kernel = Kernel()
    server = Server(kernel)
    server.do("SET", "lease", "1:a", "PX", "3000")
    first = server.do("XADD", "facts", "*", "type", "x")
    kernel.run(2.9)
    assert server.get("lease") == "1:a"
    kernel.run(3.1)
    assert server.get("lease") is None
    server.clock_ms = -10_000.0
    second = server.do("XADD", "facts", "*", "type", "y")
    assert (first, second) == (f"{START_MS}-0", f"{START_MS}-1")
    assert [entry_id for entry_id, _ in server.xread("facts", "0-0", 10)] == [first, second]
