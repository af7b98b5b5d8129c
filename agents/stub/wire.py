"""What the stub's processes say to each other over socket pairs: tagged structs in length-prefixed frames.

Server to core: `Add`, `Abort`, `Call`, `SetKnobs`. Core to server: `Up`, `Iteration`, `Reply`.
Core to worker: `Ask`; worker to core: `Told`. Frames keep their order, so a request that follows a knob
or a call meets its effect.
"""

import asyncio
import socket
from typing import Any

import msgspec

from relight.agents.stub.knobs import Knobs
from relight.agents.stub.settings import Settings
from relight.agents.stub.tokens import Token
from relight.agents.stub.weights import Tensor

_LENGTH = 4


class Message(msgspec.Struct, frozen=True, tag=True):
    """A frame's content."""


class Start(Message, frozen=True):
    """The first frame that a core and a worker read; a worker gets it `again` when knobs have changed."""

    settings: Settings
    again: bool = False


class Add(Message, frozen=True):
    """One request. `number` names it between server and core; `seeds` has one entry for each sequence."""

    number: int
    token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    temperature: float
    seeds: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    prompt_scores: bool


class Abort(Message, frozen=True):
    """Forget these requests; nothing is answered, the server has already told its client."""

    numbers: tuple[int, ...]


class Call(Message, frozen=True):
    """A question that `Reply` with the same number answers."""

    number: int
    method: str
    args: dict[str, Any]


class SetKnobs(Message, frozen=True):
    """From here on these knobs hold."""

    knobs: Knobs


class Up(Message, frozen=True):
    """The core serves; or, with `error`, it could not start and ends."""

    error: str = ""


class Made(msgspec.Struct, frozen=True, array_like=True):
    """One new token of sequence `index` of a request; an aborted sequence ends with `token_id` -1."""

    number: int
    index: int
    token_id: int
    logprob: float
    rank: int
    finish: str | None = None
    stop: int | None = None


class Iteration(Message, frozen=True):
    """What one iteration made, under which label, and the counters after it."""

    version: str
    made: tuple[Made, ...]
    iterations: int
    generated: int
    running: int
    waiting: int
    scores: dict[int, list[Token | None]] = {}
    """Prompt scores by request number, in the iteration that admits it."""
    hits: int = 0
    """Tokens that the prefix cache has answered for."""
    asleep: bool = False


class Reply(Message, frozen=True):
    """The answer to a `Call`: a value, or an error with its HTTP status."""

    number: int
    value: Any = None
    status: int = 200
    error: str = ""


class Ask(Message, frozen=True):
    """What the core wants of the worker: `step`, `health`, `load`, `checksums`, or the unanswered `stop`."""

    what: str
    folder: str = ""
    dummy: bool = False
    sleep_s: float = 0.0
    half: bool = False
    """`load` leaves every second tensor as it is."""


class Told(Message, frozen=True):
    """The worker's answer to an `Ask`."""

    digest: str = ""
    error: str = ""
    tensors: dict[str, Tensor] = {}


ToCore = Start | Add | Abort | Call | SetKnobs
ToServer = Up | Iteration | Reply
ToWorker = Start | Ask
to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


def frame(message: Message) -> bytes:
    """A message as it goes over the wire."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(_LENGTH, "big") + content


async def receive(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's content, or None when the other process is gone. Waits as long as that one lives."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_blocking(channel: socket.socket) -> bytes | None:
    """As `receive`, for the worker, which has no loop."""
    length = _exactly(channel, _LENGTH)
    return None if length is None else _exactly(channel, int.from_bytes(length, "big"))


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    content = b""
    while len(content) < size:
        try:
            piece = channel.recv(size - len(content))
        except ConnectionError:
            return None
        if not piece:
            return None
        content += piece
    return content
