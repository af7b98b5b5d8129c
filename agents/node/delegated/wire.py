"""What an agent and an application that starts engines say to each other, one JSON object a line.

Over `agent.sock` in the agent's state directory, for the agent's own user alone. The application comes and
says which slots it fills; the agent asks; each `Launch` is answered once, however late and over whatever
connection. An answer is said again at each connection until `Ended` has come for its incarnation, or another
`Launch`: a start that is tried again in the same incarnation has another number.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from relight.events.ids import EngineName, JobName, NodeName
from relight.events.values import Process

SOCKET = "agent.sock"
LINE_BYTES = 1 << 20
"""Longest line: an environment with thousands of variables lies far below it."""


class Said(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """One line."""


class OfIncarnation(Said, frozen=True, kw_only=True):
    """A line about one incarnation of one engine."""

    engine: EngineName
    incarnation: int
    number: int = 0
    """Which launch of it: a start may be tried again, and an answer bears that of its `Launch`. 0: untold."""


# --- from the application --------------------------------------------------------------------------


class Hello(Said, frozen=True, kw_only=True):
    """The first line: the slots that it fills, and what it is starting at this moment."""

    engines: tuple[EngineName, ...]
    pending: tuple[tuple[EngineName, int], ...] = ()


class Launched(OfIncarnation, frozen=True, kw_only=True):
    """It runs. The first process is the front; the end of any of them is the engine's death."""

    processes: tuple[Process, ...]
    host: str = "127.0.0.1"
    port: int | None = None
    """Where it will listen; none for the port that it was given."""
    on_weights: bool = False
    """Whether it starts on the weights that it was given."""


class LaunchFailed(OfIncarnation, frozen=True, kw_only=True):
    """Nothing runs, and nothing will."""

    detail: str
    retryable: bool = True


# --- from the agent --------------------------------------------------------------------------------


class Welcome(Said, frozen=True, kw_only=True):
    """It may stay."""

    job: JobName
    node: NodeName


class Refused(Said, frozen=True, kw_only=True):
    """It may not, and why; the connection ends."""

    reason: str


class Launch(OfIncarnation, frozen=True, kw_only=True):
    """Start the engine."""

    port: int
    command: tuple[str, ...] = ()
    """The node file's, filled in; it may be empty."""
    env: dict[str, str] = {}
    """To be laid over the engine's environment: the node file's, and the incarnation's marks."""
    weights: str | None = None
    """Folder to be started on; none where the base model is meant."""
    within_s: float


class Withdrawn(OfIncarnation, frozen=True, kw_only=True):
    """Nobody wants it any more: what has been started will be killed. The answer is still due, also where the
    `Launch` was lost on its way."""


class Ended(OfIncarnation, frozen=True, kw_only=True):
    """It is proven gone, and another `Launch` of it may follow."""

    detail: str = ""


FromApplication = Hello | Launched | LaunchFailed
FromAgent = Welcome | Refused | Launch | Withdrawn | Ended
from_application: msgspec.json.Decoder[FromApplication] = msgspec.json.Decoder(FromApplication)
from_agent: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)


def line(said: Said) -> bytes:
    """`said` as it goes over the socket."""
    return msgspec.json.encode(said) + b"\n"


@contextmanager
def door(state_dir: Path) -> Generator[str]:
    """The socket's path, for a state directory of any length: a unix socket's own path ends at 108 bytes."""
    folder = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)
