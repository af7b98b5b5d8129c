"""Between the client library's errors and ours: whatever keeps the bus from serving is BusUnavailable.

Which of them pass by themselves and which wait for a person is data: `REACTIONS`. The process waits either
way, and the sentence says what a person can do.
"""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from redis import exceptions

from relight.events.errors import BusUnavailable


class Reaction(NamedTuple):
    """What one answer of the server means."""

    says: str
    """How the answer begins."""
    kind: str
    advice: str


REACTIONS = (
    Reaction("LOADING", "loading", "it reads its data from disk and serves after that"),
    Reaction("BUSY", "busy", "a script runs on it for too long; SCRIPT KILL ends that"),
    Reaction("OOM", "full", "its memory is full: raise its maxmemory, or remove what else is stored there"),
    Reaction(
        "READONLY",
        "replica",
        "it is a replica: name the primary, or let Sentinel name it (redis+sentinel://HOST:PORT,…/SERVICE)",
    ),
    Reaction("NOREPLICAS", "replicas", "fewer replicas follow it than its min-replicas-to-write asks for"),
    Reaction("MISCONF", "disk", "it cannot write to its disk; its log says why"),
    Reaction("WRONGPASS", "credentials", "give it that user again, or start this again with a URL that fits"),
    Reaction("NOAUTH", "credentials", "it wants a password: redis://USER:PASSWORD@HOST:PORT"),
    Reaction("NOPERM", "rights", "its ACL gives this user too little; docs/bus.md says what is needed"),
    Reaction("NOSCRIPT", "scripts", "its scripts were flushed while they were in use; they are loaded again"),
    Reaction("UNBLOCKED", "demoted", "it has just become a replica"),
    Reaction("MASTERDOWN", "replica", "it is a replica that has lost its primary"),
    Reaction("CLUSTERDOWN", "cluster", "it is part of a Redis Cluster, which relight does not support yet"),
    Reaction("MOVED", "cluster", "it is part of a Redis Cluster, which relight does not support yet"),
    Reaction("TRYAGAIN", "cluster", "it is part of a Redis Cluster, which relight does not support yet"),
    Reaction(
        "WRONGTYPE",
        "foreign",
        "a key of relight's holds what relight did not write there: find it with TYPE and remove it with DEL",
    ),
    Reaction(
        "The stream has exhausted the last possible ID",
        "exhausted",
        "somebody added an entry with the last possible id: DEL both streams and the state of this job;"
        " agents and trainer then say again what is true",
    ),
)

_CODES: dict[type[exceptions.RedisError], str] = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.TryAgainError: "TRYAGAIN",
}
"""The client library takes these codes out of the text."""

_UNREACHABLE = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)

_USER_INFO = re.compile(r"(//[^:/?#@]*:).*@")
"""Greedy and by itself: URLs that cannot be taken apart are shown too."""
_QUERY = re.compile(r"([?&][a-z_]*password=)[^&#]*")
_SCRIPT = re.compile(r" script: .*", re.DOTALL)
"""What the server adds to a script's error: the same trouble reads the same from every script."""


def shown(url: str) -> str:
    """`url` without its passwords, for messages."""
    return _QUERY.sub(r"\1***", _USER_INFO.sub(r"\1***@", url, count=1))


@contextmanager
def translated(url: str, keys: Sequence[str] = ()) -> Generator[None]:
    """Raise BusUnavailable for whatever says that the server cannot be reached or does not serve.

    `keys` are those that the call touches, for the message. What the library finds wrong in our own
    arguments goes through.
    """
    try:
        yield
    except exceptions.DataError:
        raise
    except (exceptions.RedisError, OSError) as error:
        raise _unavailable(error, shown(url), keys) from error


def _unavailable(error: Exception, where: str, keys: Sequence[str]) -> BusUnavailable:
    reaction = _reaction(error)
    text = _SCRIPT.sub("", str(error)) or type(error).__name__
    if reaction is None and isinstance(error, _UNREACHABLE):
        return BusUnavailable(f"bus {where} cannot be reached: {text}")
    if reaction is None:
        return BusUnavailable(f"bus {where} refuses{_of(keys)}: {text}", kind="refused")
    of = _of(keys) if reaction.kind in ("foreign", "exhausted") else ""
    return BusUnavailable(f"bus {where} cannot serve{of}: {text}; {reaction.advice}", kind=reaction.kind)


def _reaction(error: Exception) -> Reaction | None:
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
    if code is None and isinstance(error, exceptions.AuthenticationError):
        code = "NOAUTH" if "Authentication required" in str(error) else "WRONGPASS"
    if code is None and isinstance(error, exceptions.ResponseError):
        code = str(error).lstrip("-")
    return next((each for each in REACTIONS if code and code.startswith(each.says)), None)


def _of(keys: Sequence[str]) -> str:
    return f" {', '.join(keys)}" if keys else ""
