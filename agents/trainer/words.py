"""What the ranks of one trainer say to each other, and its form between them."""

from typing import TypeVar

import msgspec

from relight.events import codec
from relight.events.decisions import SyncWeights
from relight.events.ids import EngineName
from relight.events.values import Member


class Word(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of what rank 0 says."""


class Beat(Word, frozen=True, kw_only=True):
    """How does it stand with you? Answered with a Status, after `within_s` at most if it ends meanwhile."""

    within_s: float = 0.0


class Export(Word, frozen=True, kw_only=True):
    """Take part in this export. Answered with an Outcome."""

    order: SyncWeights
    left: tuple[EngineName, ...] = ()
    """Members that had died when it began."""
    snapshots: bool
    """By the transport that publishes, not by the one that pushes."""


class Named(Word, frozen=True, kw_only=True):
    """The members of the sync that the application does now. Answered with a Result."""

    members: tuple[Member, ...]


class Over(Word, frozen=True, kw_only=True):
    """The call ends on every rank. Not answered."""

    failed: dict[int, str] = {}
    """What ranks raised in it."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands with a rank's own part of a call."""

    done: bool
    error: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a rank's part of the application's own sync."""

    failed: dict[EngineName, str] = {}
    error: str | None = None


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has come to a call, and outside it until all have."""

    call: str
    step: int | None
    fit: bool = True
    """Whether its live parameters are the version that is to be said of them."""
    error: str | None = None


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """The session stands, or why it does not."""

    run: int = 0
    error: str | None = None


class _Said(msgspec.Struct, frozen=True):
    word: Beat | Export | Named | Over


S = TypeVar("S", bound=msgspec.Struct)


def written(message: msgspec.Struct) -> bytes:
    """Any message but a Word, as bytes."""
    return codec.to_json(message).encode()


def read(data: bytes, kind: type[S]) -> S:
    return codec.from_json(data, kind)


def said(word: Beat | Export | Named | Over) -> bytes:
    return codec.to_json(_Said(word)).encode()


def heard(data: bytes) -> Beat | Export | Named | Over:
    return codec.from_json(data, _Said).word
