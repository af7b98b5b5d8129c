"""A TCP link that can be cut like a network that loses everything and delivers it late: nothing is refused,
nothing is lost, and nobody is told."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Link:
    """Forwards every connection to a server. What is cut is held, and delivered when it is joined again."""

    def __init__(self) -> None:
        self.port = 0
        self.held = bytearray()
        """What the server has not got since the last cut."""
        self._to_server = asyncio.Event()
        self._to_client = asyncio.Event()
        self._clients: set[asyncio.StreamWriter] = set()
        self.join()

    def reset(self) -> None:
        """Have every connection reset by its peer, as a middlebox does that has forgotten it."""
        for writer in self._clients:
            if writer.is_closing():
                continue
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()
        self._clients.clear()

    def cut_to_server(self) -> None:
        self._to_server.clear()
        self.held.clear()

    def cut_to_client(self) -> None:
        self._to_client.clear()

    def join(self) -> None:
        self._to_server.set()
        self._to_client.set()

    async def carry(
        self, server_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", server_port)
        except OSError:
            writer.close()
            return
        self._clients.add(writer)
        try:
            await asyncio.gather(
                self._pump(reader, to_server, self._to_server, self.held),
                self._pump(from_server, writer, self._to_client, bytearray()),
            )
        finally:
            self._clients.discard(writer)

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, joined: asyncio.Event, held: bytearray
    ) -> None:
        try:
            while data := await reader.read(65536):
                if not joined.is_set():
                    held += data
                await joined.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one end has closed it
        finally:
            writer.close()


@asynccontextmanager
async def link_to(server_port: int) -> AsyncIterator[Link]:
    """A link to the server on this port; its own is `port`."""
    link = Link()
    carried: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carried.add(asyncio.create_task(link.carry(server_port, reader, writer)))

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    link.port = listening.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        listening.close()
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)


class Way:
    """A link that can be lost for new connections too: they are neither refused nor accepted."""

    def __init__(self, server_port: int) -> None:
        self.link = Link()
        self._server_port = server_port
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._listening.setblocking(False)
        self.link.port = self._listening.getsockname()[1]
        self._accepting: asyncio.Task[None] | None = None
        self._carried: set[asyncio.Task[None]] = set()
        self._queued: list[socket.socket] = []

    async def __aenter__(self) -> "Way":
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def _accept(self) -> None:
        while True:
            taken, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            reader, writer = await asyncio.open_connection(sock=taken)
            self._carried.add(asyncio.create_task(self.link.carry(self._server_port, reader, writer)))

    async def cut(self) -> None:
        """Hold what is carried, and fill the queue of the listening socket: its kernel drops all others."""
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self.link.cut_to_server()
        self.link.cut_to_client()
        while True:
            waiting = socket.socket()
            waiting.setblocking(False)
            self._queued.append(waiting)
            try:
                async with asyncio.timeout(0.5):
                    await asyncio.get_running_loop().sock_connect(waiting, ("127.0.0.1", self.link.port))
            except TimeoutError:
                return

    async def __aexit__(self, *_: object) -> None:
        assert self._accepting is not None
        for task in (self._accepting, *self._carried):
            task.cancel()
        await asyncio.gather(self._accepting, *self._carried, return_exceptions=True)
        for each in (self._listening, *self._queued):
            each.close()
