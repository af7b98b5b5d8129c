"""The core process ("EngineCore"): it schedules, generates through its worker and answers the server's calls.

Calls are taken one after another, as in vLLM: a reload that takes long makes /is_paused wait. The core dies
with its worker, and lives on when its server is gone. It uses asyncio itself, without anyio, because the
start of a stub must stay well below a second.
"""

import asyncio
import os
import signal
import socket
import sys
from typing import NoReturn

import msgspec

from relight.agents.stub import wire
from relight.agents.stub.calls import CallFailed, answer
from relight.agents.stub.link import WorkerLink, open_link
from relight.agents.stub.part import PartLinks
from relight.agents.stub.processes import compile_for, connected_child
from relight.agents.stub.scheduler import Scheduler, Sequence
from relight.agents.stub.settings import Settings
from relight.agents.stub.tokens import VOCABULARY, Digest, score_prompt
from relight.agents.stub.wire import (
    Abort,
    Add,
    Ask,
    Call,
    Iteration,
    Made,
    Message,
    Reply,
    SetKnobs,
    Start,
)


class Core:
    """One engine core: its scheduler, its worker's channel, the label and digest of its weights."""

    def __init__(self, settings: Settings, server: asyncio.StreamWriter, worker: WorkerLink) -> None:
        self.worker = worker
        self.parts = PartLinks()
        self.settings = settings
        self.knobs = settings.knobs
        self.scheduler = Scheduler(settings.max_num_seqs)
        self.digest = Digest("")
        self.version = "default"
        self.dummy = settings.load_format == "dummy"
        self.asleep = False
        self.poisoned = False
        self.updating = False
        """Between the start and a good end of a pushed update."""
        self._budget = self._fresh_budget()
        self._server = server
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._deferred: set[asyncio.Task[None]] = set()

    async def run(self, server: asyncio.StreamReader) -> NoReturn:
        """Load, say so, then serve until an end comes from outside or from a knob."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.worker.hear())
            self.worker.set(self.settings)
            error = await self._load(self.settings.model) or await self.parts.gather(self.settings)
            if self.knobs.slow_start_s:
                await asyncio.sleep(self.knobs.slow_start_s)
            self.send(wire.Up(error or self.knobs.start_fails))
            if self.knobs.die_after_s is not None:
                loop.call_later(self.knobs.die_after_s, os.kill, os.getpid(), signal.SIGKILL)
            tasks.create_task(self._iterate())
            tasks.create_task(self._hear_server(server))
        raise AssertionError("a core ends by exit only")

    @property
    def label(self) -> str:
        """The version as told outside."""
        return self.knobs.lying_version or self.version

    def send(self, message: Message) -> None:
        """Write to the server while there is one."""
        if not self._server.is_closing():
            self._server.write(wire.frame(message))

    async def _hear_server(self, reader: asyncio.StreamReader) -> None:
        while (content := await wire.receive(reader)) is not None:
            match wire.to_core.decode(content):
                case Add() as add:
                    if self.poisoned or max(add.token_ids) >= VOCABULARY:  # both kill vLLM's core
                        os._exit(1)
                    self.scheduler.add(add, self.digest, self.knobs.prefix_cache)
                    self.report()
                case Abort(numbers=numbers):
                    self.scheduler.abort(numbers)
                    self.report()
                case Call() as call:
                    await self._answer(call)
                case SetKnobs(knobs=knobs):
                    self.settings = msgspec.structs.replace(self.settings, knobs=knobs)
                    self.knobs = knobs
                    self._budget = self._fresh_budget()
                    self.worker.set(self.settings, again=True)
                    if knobs.compile_s:
                        compile_for(knobs.compile_s)
                    await self._spend(0)
                case Start():
                    raise AssertionError("a core is started once")
        self._server.close()
        await asyncio.sleep(self.knobs.orphan_s)
        os._exit(1)

    async def _answer(self, call: Call) -> None:
        if call.method == "pause" and call.args["mode"] == "wait":
            task = asyncio.create_task(self._pause_wait(call.number))
            self._deferred.add(task)
            task.add_done_callback(self._deferred.discard)
            return
        try:
            self.send(Reply(call.number, await answer(self, call.method, call.args)))
        except CallFailed as error:
            self.send(Reply(call.number, status=500, error=str(error)))
        self.report()
        if call.method == "wake_up" and self.knobs.dies_at_wake_up:
            await self._server.drain()
            os._exit(1)

    async def _pause_wait(self, number: int) -> None:
        self.scheduler.pause("wait")
        self.report()
        await self._idle.wait()
        self.scheduler.reset_cache(self.knobs.prefix_cache, preempt=False)
        self.send(Reply(number))

    async def _load(self, folder: str) -> str:
        told = await self.worker.ask(Ask("load", folder=folder, dummy=self.dummy))
        self.digest = Digest(told.digest)
        return told.error

    async def _iterate(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._work.is_set():
                await self._work.wait()
                due = loop.time()
            await self.worker.ask(Ask("step"))
            await self.parts.step()
            if self.scheduler.runnable:
                made, admitted = self.scheduler.step(self.digest, self._budget)
                self.report(made, admitted)
                await self._spend(len(made))
            due = max(due + self.settings.token_interval_ms / 1000, loop.time())
            await asyncio.sleep(due - loop.time())

    def report(self, made: list[Made] | None = None, admitted: list[Sequence] | None = None) -> None:
        """Tell what was made and the counters, and wake or rest the iterations."""
        scheduler = self.scheduler
        scores = {
            sequence.number: score_prompt(self.digest, sequence.add.token_ids)
            for sequence in admitted or ()
            if sequence.add.prompt_scores and sequence.index == 0
        }
        counters = (scheduler.iterations, scheduler.generated, len(scheduler.running), len(scheduler.waiting))
        self.send(Iteration(self.label, tuple(made or ()), *counters, scores, scheduler.hits, self.asleep))
        (self._work.set if scheduler.runnable else self._work.clear)()
        (self._idle.clear if scheduler.running else self._idle.set)()

    def _fresh_budget(self) -> int | None:
        counts = (self.knobs.freeze_after_tokens, self.knobs.exit_after_tokens)
        return min((count for count in counts if count is not None), default=None)

    async def _spend(self, tokens: int) -> None:
        """Count tokens against a knob, and freeze or exit when they are used up and have been sent."""
        if self._budget is None:
            return
        self._budget -= tokens
        if self._budget > 0:
            return
        await self._server.drain()
        if self.knobs.exit_after_tokens is not None:
            os._exit(0)
        self.knobs = msgspec.structs.replace(self.knobs, freeze_after_tokens=None)
        self._budget = None
        os.kill(os.getpid(), signal.SIGSTOP)

    def _on_sigterm(self) -> None:
        if not self.knobs.ignore_sigterm and not self._stopping:
            self._stopping = True
            task = asyncio.create_task(self._stop())
            self._deferred.add(task)

    async def _stop(self) -> None:
        try:
            await self.worker.stop()
        except TimeoutError:
            os._exit(1)  # closes the worker's channel
        os._exit(0)


async def _main(channel: socket.socket, worker: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until all is written
    content = await wire.receive(reader)
    start = None if content is None else wire.to_core.decode(content)
    if not isinstance(start, Start):
        os._exit(1)
    await Core(start.settings, writer, await open_link(worker)).run(reader)


def main() -> None:
    """Serve one server over the inherited socket, whose number is the second argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[2]))
    _, worker = connected_child("worker", sys.argv[1].replace("::EngineCore", "::Worker"))
    asyncio.run(_main(channel, worker))


if __name__ == "__main__":
    main()
