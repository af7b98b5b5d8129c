"""The server's side of the core: its generations, its calls, its counters, and its death.

The invariant: each generation ends exactly once for its client, by a finish, an abort or an error, also when
the core dies; a stopped core ends nothing, it only makes callers wait.
"""

import asyncio
import itertools
import socket
from collections.abc import Iterable
from typing import Any

import msgspec

from relight.agents.stub import wire
from relight.agents.stub.generation import Generation, Part
from relight.agents.stub.knobs import Knobs
from relight.agents.stub.settings import Settings
from relight.agents.stub.tokens import Token

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class EngineError(Exception):
    """What the engine answers instead of a value; the message is vLLM's."""


class Engine:
    """The core as the routes see it. Owns the channel to it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.knobs = settings.knobs
        self.up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.dead = asyncio.Event()
        self.ended = ""
        self.draining = False
        self.load = 0
        self.stats = wire.Iteration("default", (), 0, 0, 0, 0)
        self.prompted = 0
        self.finished: dict[str, int] = {}
        self.shift = 0.0
        self.quiet = asyncio.Event()
        self.quiet.set()
        self._turn = 0
        self._numbers = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._calls: dict[int, asyncio.Future[wire.Reply]] = {}

    async def listen(self, channel: socket.socket) -> None:
        """Take what the core says until it is gone; then end all that waits for it."""
        reader, self._writer = await asyncio.open_connection(sock=channel)
        self._writer.write(wire.frame(wire.Start(self.settings)))
        while (content := await wire.receive(reader)) is not None:
            match wire.to_server.decode(content):
                case wire.Iteration() as iteration:
                    self._take(iteration)
                case wire.Reply() as reply:
                    waiting = self._calls.pop(reply.number, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)
                case wire.Up(error=error):
                    self.up.set_result(error)
        self.dead.set()
        if not self.up.done():
            self.up.set_result("Engine core initialization failed.")
        self.fail_all()

    def fail_all(self) -> None:
        """End every generation and call with vLLM's words for a dead core."""
        self.ended = ENGINE_DEAD
        for generation in self._generations.values():
            generation.error = generation.error or ENGINE_DEAD
            generation.changed.set()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineError(ENGINE_DEAD))

    async def call(self, method: str, /, **args: Any) -> Any:
        """Ask the core; waits as long as it lives. Raises `EngineError`."""
        if self.ended:
            raise EngineError(ENGINE_DEAD)
        number = next(self._numbers)
        answer: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._writer.write(wire.frame(wire.Call(number, method, args)))
        try:
            reply = await answer
        finally:
            self._calls.pop(number, None)
        if reply.error:
            raise EngineError(reply.error)
        return reply.value

    def begin(self, request_id: str, add: wire.Add) -> Generation:
        """Send a request to the core under a number of its own. Raises `EngineError`."""
        if self.ended:
            raise EngineError(ENGINE_DEAD)
        generation = Generation(next(self._numbers), request_id, len(add.seeds))
        self._generations[generation.number] = generation
        self.quiet.clear()
        self.prompted += len(add.token_ids)
        self._writer.write(wire.frame(msgspec.structs.replace(add, number=generation.number)))
        return generation

    def leave(self, generation: Generation) -> None:
        """The client has its answer or is gone: the core may forget what is not over."""
        self._generations.pop(generation.number, None)
        if not generation.over and not self.ended:
            self._writer.write(wire.frame(wire.Abort((generation.number,))))
        if not self._generations:
            self.quiet.set()

    def abort(self, request_ids: Iterable[str] | None) -> int:
        """End requests with finish reason abort, all of them for None; answers how many were named."""
        wanted = None if request_ids is None else set(request_ids)
        gone = [each for each in self._generations.values() if wanted is None or each.request_id in wanted]
        for generation in gone:
            for part in generation.parts:
                self._finish(part, "abort")
            generation.changed.set()
        if gone and not self.ended:
            self._writer.write(wire.frame(wire.Abort(tuple(each.number for each in gone))))
        return len(gone) if wanted is None else len(wanted)

    def set_knobs(self, knobs: Knobs) -> None:
        """Take new knobs here and, in order with what follows, in the core."""
        self.knobs = knobs
        self._turn = 0
        self.shift = 0.0
        if not self.ended:
            self._writer.write(wire.frame(wire.SetKnobs(knobs)))

    def strike(self) -> bool:
        """Whether the stream fault strikes the generation that asks; counts it."""
        knobs = self.knobs
        turn = self._turn - knobs.stream_fault_skip
        self._turn += 1
        return knobs.stream_fault != "none" and turn >= 0 and not 0 < knobs.stream_fault_times <= turn

    def _finish(self, part: Part, reason: str, stop: int | None = None) -> None:
        if part.finish is None:
            part.finish, part.stop = reason, stop
            self.finished[reason] = self.finished.get(reason, 0) + 1

    def _take(self, iteration: wire.Iteration) -> None:
        self.stats = iteration
        for number, scores in iteration.scores.items():
            if number in self._generations:
                self._generations[number].scores = scores
        shift = self.knobs.logprob_shift + self.shift
        for made in iteration.made:
            generation = self._generations.get(made.number)
            if generation is None or generation.parts[made.index].finish:
                continue
            part = generation.parts[made.index]
            if made.token_id >= 0:
                if not part.starts or part.starts[-1][0] != iteration.version:
                    part.starts.append((iteration.version, len(part.tokens)))
                part.tokens.append(Token(made.token_id, made.logprob + shift, made.rank))
            if made.finish:
                self._finish(part, made.finish, made.stop)
            generation.changed.set()
