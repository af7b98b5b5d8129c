"""The core's side of its worker: one question at a time, and the worker's death is the core's."""

import asyncio
import os
import socket

from relight.agents.stub import wire
from relight.agents.stub.settings import Settings
from relight.agents.stub.wire import Ask, Start, Told

_STOP_S = 1.0  # for a worker that was told to stop


class WorkerLink:
    """Owns the channel to the worker; `open_link` makes one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._one_at_a_time = asyncio.Lock()
        self._told: asyncio.Queue[Told] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._stopping = False

    async def ask(self, ask: Ask) -> Told:
        """Ask and wait as long as the worker lives: a stopped one holds up everything, as in vLLM."""
        async with self._one_at_a_time:
            self._writer.write(wire.frame(ask))
            return await self._told.get()

    def set(self, settings: Settings, *, again: bool = False) -> None:
        """Tell the settings, at the start and `again` when knobs have changed."""
        self._writer.write(wire.frame(Start(settings, again=again)))

    async def hear(self) -> None:
        """Take answers until the worker is gone, and go with it unless it was told to stop."""
        while (content := await wire.receive(self._reader)) is not None:
            self._told.put_nowait(wire.from_worker.decode(content))
        if not self._stopping:
            os._exit(1)
        self._gone.set()

    async def stop(self) -> None:
        """Tell the worker to end clean and wait for it; raises `TimeoutError` when it does not."""
        self._stopping = True
        self._writer.write(wire.frame(Ask("stop")))
        await asyncio.wait_for(self._gone.wait(), _STOP_S)


async def open_link(channel: socket.socket) -> WorkerLink:
    """A link over a connected socket."""
    return WorkerLink(*await asyncio.open_connection(sock=channel))
