"""The agent's side of the socket: which applications are there, who fills which slot, and what they said.

Invariants: an application is known by its process (peer credentials and start time), is of the agent's own
user, and fills each slot alone. What it owes an answer for is forgotten only by its answer or its end.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectSendStream

from relight.agents.node import pidfd, proc
from relight.agents.node.delegated import wire
from relight.agents.node.delegated.wire import Hello, Launched, LaunchFailed, Refused, Said, Welcome
from relight.events.errors import UsageError
from relight.events.ids import EngineName, JobName, NodeName
from relight.events.values import Process

log = logging.getLogger(__name__)

HELLO_S = 5.0
"""For the first line of whoever connects."""
UNSENT = 64
"""Lines that an application may leave unread before its connection is given up."""

Answer = Launched | LaunchFailed
Key = tuple[EngineName, int]


class Application:
    """One process that starts engines, connected or not. Watched until it ends."""

    def __init__(self, process: Process, *, changed: Callable[[], None]) -> None:
        """Watch it; `changed` is called at its end."""
        self.process = process
        self.ended = False
        self.sending: MemoryObjectSendStream[Said] | None = None
        """Where lines to it go; none while it is not connected."""
        self._changed = changed
        self._fd = pidfd.hold(process)
        if self._fd is None:
            self.ended = True
        else:
            asyncio.get_running_loop().add_reader(self._fd, self._end)

    def send(self, said: Said) -> bool:
        """Whether `said` is on its way; one that reads nothing is as good as gone."""
        if self.sending is None:
            return False
        try:
            self.sending.send_nowait(said)
        except (anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            log.warning("an application does not read pid=%d", self.process.pid)
            return False
        return True

    def close(self) -> None:
        """Watch it no more."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _end(self) -> None:
        self.ended = True
        self.close()
        self._changed()


class Owing(NamedTuple):
    """A launch that is not answered yet."""

    application: Application
    number: int
    """The launch's own; 0 where only the application knows it."""

    def is_answered_by(self, said: Answer) -> bool:
        """Whether `said` is of this launch and not of an earlier one of the same incarnation."""
        return said.number == self.number or 0 in (said.number, self.number)


class Desk:
    """All applications of one agent."""

    def __init__(
        self, state_dir: Path, *, job: JobName, node: NodeName, slots: Collection[EngineName]
    ) -> None:
        self._state_dir = state_dir
        self._welcome = Welcome(job=job, node=node)
        self._slots = frozenset(slots)
        self._known: dict[Process, Application] = {}
        self._fillers: dict[EngineName, Application] = {}
        self._changed = anyio.Event()
        self.owed: dict[Key, Owing] = {}
        """Launches without an answer."""
        self.answers: dict[Key, Answer] = {}
        """Answers that nobody has taken yet."""

    @property
    def where(self) -> str:
        return str(self._state_dir / wire.SOCKET)

    def filler(self, engine: EngineName) -> Application | None:
        """The application that fills this slot now."""
        application = self._fillers.get(engine)
        return application if application is not None and application.sending is not None else None

    def know(self, process: Process) -> Application:
        """The application that this process is, or was."""
        owing = {id(owed.application) for owed in self.owed.values()}
        self._known = {
            each: known for each, known in self._known.items() if not known.ended or id(known) in owing
        }
        application = self._known.get(process)
        if application is None:
            application = self._known[process] = Application(process, changed=self._tell)
        return application

    async def changed(self) -> None:
        """Return when something new is known. The caller gives the deadline."""
        await self._changed.wait()

    def close(self) -> None:
        """Watch nobody any more."""
        for application in self._known.values():
            application.close()

    async def run(self) -> None:
        """Serve for ever. The socket is its owner's alone. Raises UsageError where there can be none."""
        try:
            with wire.door(self._state_dir) as path:
                listener = await anyio.create_unix_listener(path, mode=0o600)
        except OSError as error:
            raise UsageError(f"{self.where} cannot be listened on: {error.strerror}") from error
        async with listener:
            await listener.serve(self._serve)

    async def _serve(self, stream: SocketStream) -> None:
        async with stream:
            try:
                await self._meet(stream)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
                return
            except (anyio.DelimiterNotFound, msgspec.MsgspecError, TimeoutError) as error:
                log.warning("somebody at the socket is no application of ours error=%s", error)

    async def _meet(self, stream: SocketStream) -> None:
        process, why = _peer(stream.extra(SocketAttribute.raw_socket))  # noqa: S610 -- no Django here
        reader = BufferedByteReceiveStream(stream)
        with anyio.fail_after(HELLO_S):
            hello = await _next(reader)
        if not isinstance(hello, Hello):
            why = why or "the first line must be Hello"
        else:
            why = why or self._objection(hello, process)
        if why is not None or process is None or not isinstance(hello, Hello):
            log.warning("an application is refused process=%s reason=%s", process, why)
            await stream.send(wire.line(Refused(reason=why or "its process is gone")))
            return
        await self._host(stream, reader, self.know(process), hello)

    def _objection(self, hello: Hello, process: Process | None) -> str | None:
        strange = sorted(set(hello.engines) - self._slots)
        if strange or not hello.engines:
            named = ", ".join(strange) or "none"
            ours = ", ".join(sorted(self._slots))
            return f"it fills {named}; this node delegates {ours}"
        for engine in hello.engines:
            other = self.filler(engine)
            if other is not None and other.process != process:
                return f"{engine} is filled by another application (pid {other.process.pid}) already"
        return None

    async def _host(
        self, stream: SocketStream, reader: BufferedByteReceiveStream, application: Application, hello: Hello
    ) -> None:
        sending, lines = anyio.create_memory_object_stream[Said](UNSENT)
        application.sending = sending
        sending.send_nowait(self._welcome)
        for engine in hello.engines:
            self._fillers[engine] = application
        for key in hello.pending:
            self.owed.setdefault(key, Owing(application, 0))
        self._tell()
        log.info("an application fills %s pid=%d", ", ".join(hello.engines), application.process.pid)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_write, stream, lines)
                while True:
                    self._hear(application, await _next(reader))
        except* (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            log.info("an application's connection has ended pid=%d", application.process.pid)
        finally:
            if application.sending is sending:
                application.sending = None
            sending.close()
            lines.close()
            self._tell()

    def _hear(self, application: Application, said: wire.FromApplication) -> None:
        if isinstance(said, Hello):
            return
        key = (said.engine, said.incarnation)
        owed = self.owed.get(key)
        if owed is None or owed.application is not application or not owed.is_answered_by(said):
            return  # said again, or of a start that nobody here knows of
        del self.owed[key]
        self.answers[key] = said
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _peer(connection: socket.socket) -> tuple[Process | None, str | None]:
    """Who is at the other end, by the kernel's word; and why it may not stay."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        return None, f"it runs as user {uid}, the agent as {os.geteuid()}"
    stat = proc.read_stat(pid) if pid else None
    return (stat.process, None) if stat else (None, f"its process (pid {pid}) cannot be seen from here")


async def _next(reader: BufferedByteReceiveStream) -> wire.FromApplication:
    return wire.from_application.decode(await reader.receive_until(b"\n", wire.LINE_BYTES))


async def _write(stream: SocketStream, lines: "anyio.abc.ObjectReceiveStream[Said]") -> None:
    async for said in lines:
        await stream.send(wire.line(said))
