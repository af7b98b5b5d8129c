"""Control calls to several engines at once, from a thread that has no event loop.

Each call goes to all members at the same time and ends for all of them: with an answer, an error, the
deadline, or because `abort` has closed their connections.
"""

import http.client
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from relight.events.errors import RelightError
from relight.events.ids import EngineName
from relight.events.values import Member

SHOWN = 300
"""Characters of an engine's refusal that are told."""


class MembersFailed(RelightError):
    """A call failed at some members: `errors` says at which, and how.

    `refused` are those of them that answered so; what the others have done of it nobody knows.
    """

    def __init__(self, call: str, errors: dict[EngineName, str], *, refused: frozenset[EngineName]) -> None:
        super().__init__(f"{call}: " + "; ".join(f"{name}: {error}" for name, error in errors.items()))
        self.errors = errors
        self.refused = refused


class Refused(RelightError):
    """A status that is not 200."""


class Fleet:
    """The members of one sync, until its deadline."""

    def __init__(self, members: Sequence[Member], *, within_s: float) -> None:
        self.members = tuple(members)
        self._end_at = time.monotonic() + within_s
        self._open: set[http.client.HTTPConnection] = set()
        self._aborted = ""

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._end_at - time.monotonic())

    def abort(self, why: str) -> None:
        """End every call under way, and each later one, with this error. From any thread."""
        self._aborted = self._aborted or why
        for connection in list(self._open):
            with suppress(OSError, AttributeError):  # it may be connecting, or be gone by itself
                connection.sock.shutdown(socket.SHUT_RDWR)

    def post(
        self,
        path: str,
        body: Callable[[Member], object] = lambda _: None,
        *,
        members: Sequence[Member] | None = None,
    ) -> dict[EngineName, Any]:
        """What each member answers to a POST of `body`, as for `get`. Raises MembersFailed."""
        return self._all("POST", path, body, self.members if members is None else members)

    def get(self, path: str) -> dict[EngineName, Any]:
        """What each member answers to a GET: JSON as values, anything else as bytes. Raises MembersFailed."""
        return self._all("GET", path, lambda _: None, self.members)

    def _all(
        self, method: str, path: str, body: Callable[[Member], object], members: Sequence[Member]
    ) -> dict[EngineName, Any]:
        if not members:
            return {}
        answers: dict[EngineName, Any] = {}
        errors: dict[EngineName, str] = {}
        refused: set[EngineName] = set()
        with ThreadPoolExecutor(len(members), thread_name_prefix="relight-fleet") as pool:
            asked = {
                member.engine: pool.submit(self._one, member, method, path, body(member))
                for member in members
            }
        for name, answer in asked.items():
            try:
                answers[name] = answer.result()
            except Refused as error:
                errors[name] = str(error)
                refused.add(name)
            except (OSError, http.client.HTTPException, RelightError, msgspec.DecodeError) as error:
                errors[name] = self._aborted or f"{type(error).__name__}: {error}"
        if errors:
            raise MembersFailed(f"{method} {path}", errors, refused=frozenset(refused))
        return answers

    def _one(self, member: Member, method: str, path: str, body: object) -> Any:
        if self._aborted:
            raise RelightError(self._aborted)
        parts = urlsplit(member.address)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port or 80, timeout=max(self.left_s, 0.001)
        )
        self._open.add(connection)
        try:
            data = None if body is None else msgspec.json.encode(body)
            headers = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            self._open.discard(connection)
            connection.close()
        if answer.status != 200:
            raise Refused(f"{answer.status} {content[:SHOWN].decode(errors='replace')}")
        if "json" not in answer.headers.get("Content-Type", ""):
            return content
        return msgspec.json.decode(content)
