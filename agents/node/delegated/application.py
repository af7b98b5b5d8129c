"""The application's side: `relight.delegate` starts engines when the node agent asks for them.

Invariant: each order is answered, however late, also over another connection or to another life of the
agent; what was started for an order that was withdrawn meanwhile is reported all the same, and the agent ends
it. Standard library and threads only, so that it fits into a program of any kind.
"""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from relight.agents.node import environ, proc
from relight.agents.node.delegated import wire
from relight.agents.node.delegated.wire import (
    Ended,
    Hello,
    Launch,
    Launched,
    LaunchFailed,
    Refused,
    Welcome,
    Withdrawn,
)
from relight.events.errors import RelightError, UsageError
from relight.events.ids import EngineName, engine_name
from relight.events.values import Process

log = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Between two tries to reach an agent that is away."""
SEND_S = 5.0
"""For a line to be taken; an agent that stands still for so long is met again later."""


class AgentUnreachable(RelightError):
    """No agent answers at its socket."""


class Order(NamedTuple):
    """One engine to be started now."""

    engine: str
    incarnation: int
    port: int
    """Where it shall listen; the agent keeps it free of others."""
    weights: Path | None
    """Folder of the weights to start on; none for the base model."""
    command: tuple[str, ...]
    """The node file's command, filled in; empty where there is none."""
    marks: Mapping[str, str]
    """Variables by which its processes are known, with those of the node file."""
    within_s: float
    """After so long it is given up."""
    withdrawn: threading.Event
    """Set once nobody wants it any more: a start that takes long may end early, by raising."""

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The engine's environment: `inherited` less what would mislead it, and the marks over it."""
        return {**environ.cleaned(inherited), **self.marks}


class Started(NamedTuple):
    """What was started for an order."""

    pids: Iterable[int]
    """Living children of this process, the front one first."""
    port: int | None = None
    """Where it will listen; none for the order's port."""
    host: str = "127.0.0.1"
    on_weights: bool = False
    """Whether it starts on the order's `weights`."""


class _Pending(NamedTuple):
    """An order whose function runs."""

    withdrawn: threading.Event
    number: int
    """Of the launch that its answer is for."""


Start = Callable[[Order], Started | Iterable[int]]
Key = tuple[EngineName, int]


def delegate(
    state_dir: str | Path,
    starts: Mapping[str, Start],
    *,
    ended: Callable[[str, int, str], None] | None = None,
    connect_s: float = 10.0,
) -> "Delegate":
    """Start engines for the node agent that keeps `state_dir`, as long as the `with` block lasts.

    `starts` names for each slot of `launcher = "delegated"` the function that starts it: called with an
    `Order` in a thread of its own, it returns the pids (or `Started`) as soon as the processes live, without
    waiting until they serve. What it raises is told as a failed start. `ended(engine, incarnation, why)` is
    called once an incarnation is proven gone: its processes can be reaped then. Nothing may start it again
    but another order, which may be for the same incarnation where its start is tried once more.

    Raises UsageError, and on entry UsageError where the agent refuses this process, or AgentUnreachable
    where none answers within `connect_s`.
    """
    if not starts:
        raise UsageError("relight.delegate needs at least one engine")
    if not 0 < connect_s < float("inf"):
        raise UsageError(f"connect_s {connect_s} must be a finite number of seconds above 0")
    return Delegate(Path(state_dir), {engine_name(name): starts[name] for name in starts}, ended, connect_s)


class Delegate:
    """What `delegate` gives."""

    def __init__(
        self,
        state_dir: Path,
        starts: Mapping[EngineName, Start],
        ended: Callable[[str, int, str], None] | None,
        connect_s: float,
    ) -> None:
        self._state_dir = state_dir
        self._starts = starts
        self._on_end = ended
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pending: dict[Key, _Pending] = {}
        self._answers: dict[Key, Launched | LaunchFailed] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relight-delegate", daemon=True)
        self._lines = b""

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._connect_s
        while True:
            try:
                self._connect()
                break
            except OSError as error:
                if time.monotonic() + AGAIN_S > deadline:
                    where = self._state_dir / wire.SOCKET
                    raise AgentUnreachable(
                        f"no agent answers at {where} within {self._connect_s:g} s: {error}"
                    ) from error
                self._closing.wait(AGAIN_S)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        with self._lock:
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _connect(self) -> None:
        """Meet the agent and say again what it may have missed. Raises OSError, UsageError."""
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.settimeout(SEND_S)
            with wire.door(self._state_dir) as path:
                channel.connect(path)
            self._lines = b""
            with self._lock:
                pending = tuple(sorted(self._pending))
            channel.sendall(wire.line(Hello(engines=tuple(sorted(self._starts)), pending=pending)))
            met = self._next(channel)
            if isinstance(met, Refused):
                raise UsageError(f"the agent at {self._state_dir} refuses this process: {met.reason}")
            if not isinstance(met, Welcome):
                raise ConnectionError(f"the agent began with {type(met).__name__}")
            channel.settimeout(None)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
        except BaseException:
            channel.close()
            raise
        with self._lock:
            self._socket = channel
            for answer in self._answers.values():
                self._send(answer)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if self._socket is None:
                    self._connect()
                assert self._socket is not None
                while (said := self._next(self._socket)) is not None:
                    self._obey(said)
            except (OSError, UsageError, msgspec.MsgspecError) as error:
                log.warning("the agent is away or refuses us; it is tried again error=%s", error)
            with self._lock:
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None
            self._closing.wait(AGAIN_S)

    def _next(self, channel: socket.socket) -> wire.FromAgent | None:
        """The next line; None at the end."""
        while b"\n" not in self._lines:
            piece = channel.recv(1 << 16)
            if not piece:
                return None
            self._lines += piece
        line, _, self._lines = self._lines.partition(b"\n")
        return wire.from_agent.decode(line)

    def _send(self, said: wire.Said) -> None:
        """Send a line; where that fails it is said again at the next connection. The lock is held."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(wire.line(said))
        except OSError as error:
            log.warning("the agent went away error=%s", error)

    def _obey(self, said: wire.FromAgent) -> None:
        match said:
            case Launch():
                self._launch(said)
            case Withdrawn():
                self._withdraw(said)
            case Ended():
                with self._lock:
                    self._answers.pop((said.engine, said.incarnation), None)
                if self._on_end is not None:
                    self._on_end(said.engine, said.incarnation, said.detail)
            case Welcome() | Refused():
                log.warning("the agent greets twice")

    def _withdraw(self, said: Withdrawn) -> None:
        """Tell the function that runs; where none does, the answer: its launch may be lost, or the answer."""
        key = (said.engine, said.incarnation)
        with self._lock:
            if pending := self._pending.get(key):
                pending.withdrawn.set()
                return
            answer = self._answers.get(key)
            if answer is not None and said.number in (0, answer.number):
                self._send(answer)
            elif said.number:
                self._send(
                    LaunchFailed(
                        engine=said.engine,
                        incarnation=said.incarnation,
                        number=said.number,
                        detail="it was withdrawn before it was asked for",
                    )
                )

    def _launch(self, launch: Launch) -> None:
        """Start what is asked for: the agent asks again only once it has proven the last one gone."""
        key = (launch.engine, launch.incarnation)
        with self._lock:
            if pending := self._pending.get(key):
                self._pending[key] = pending._replace(number=launch.number)
                return
            order = _order(launch)
            self._pending[key] = _Pending(order.withdrawn, launch.number)
            for older in [each for each in self._answers if each[0] == key[0] and each[1] <= key[1]]:
                del self._answers[older]
        threading.Thread(target=self._start, args=(order, key), name=f"relight-{key}", daemon=True).start()

    def _start(self, order: Order, key: Key) -> None:
        told: Launched | LaunchFailed
        try:
            told = _reported(self._starts[key[0]](order), key)
        except Exception as error:  # the application's own: the agent tells it as a failed start
            log.warning("a start failed engine=%s.%d", *key, exc_info=True)
            told = LaunchFailed(engine=key[0], incarnation=key[1], detail=f"{type(error).__name__}: {error}")
        with self._lock:
            told = msgspec.structs.replace(told, number=self._pending.pop(key).number)
            self._answers[key] = told
            self._send(told)


def _order(launch: Launch) -> Order:
    return Order(
        engine=launch.engine,
        incarnation=launch.incarnation,
        port=launch.port,
        weights=Path(launch.weights) if launch.weights else None,
        command=launch.command,
        marks=launch.env,
        within_s=launch.within_s,
        withdrawn=threading.Event(),
    )


def _reported(result: Started | Iterable[int], key: Key) -> Launched:
    started = result if isinstance(result, Started) else Started(result)
    processes: list[Process] = []
    for pid in started.pids:
        stat = proc.read_stat(pid)
        processes.append(stat.process if stat else Process(pid, 0))  # the agent says that it does not live
    return Launched(
        engine=key[0],
        incarnation=key[1],
        processes=tuple(processes),
        host=started.host,
        port=started.port,
        on_weights=started.on_weights,
    )
