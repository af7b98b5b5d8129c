"""One attempt over HTTP: a streamed generation that can be cut off from outside at any moment.

What breaks it is told apart here: the engine's failure (`Interrupted`), the caller's fault (`Rejected`), and
an engine that is busy (`Overloaded`). A fence or a deadline wakes the reader even where no byte and no FIN
ever comes: the reading costs nothing for it, since the reader's own future is made to fail.
"""

import asyncio
import errno
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import aiohttp
import anyio
import msgspec

from relight.agents.replay import wire
from relight.agents.replay.sse import Events, EventTooLong
from relight.agents.replay.turn import End
from relight.agents.replay.wire import Chunk, Failure

CONNECT_S = 5.0
"""A node that answers nothing at all is found out after that."""

PATH = "/inference/v1/generate"
_DONE = b"[DONE]"
_SHOWN = 300  # characters of an engine's error kept in a detail


class Interrupted(Exception):
    """The attempt is over and the turn is not."""

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(detail)
        self.end = end
        self.detail = detail


class Rejected(Exception):
    """The engine refuses the request as such."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}: {_text(body)}")
        self.status = status
        self.body = body


class Overloaded(Exception):
    """The engine takes no request now, or this process can send none (`end`)."""

    def __init__(self, retry_after_s: float, detail: str, *, end: End = End.OVERLOADED) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s
        self.end = end


class Flight:
    """One attempt under way. Used by one task; `cut` may be called by any other of the same loop."""

    def __init__(self, *, ranked: bool, idle_s: float | None) -> None:
        self._decoder: msgspec.json.Decoder[wire.RankedChunk] | msgspec.json.Decoder[wire.ScoredChunk] = (
            wire.ranked if ranked else wire.scored
        )
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: anyio.CancelScope | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._events = Events()
        self._cut: Interrupted | None = None
        self._waiting_since: float | None = None
        self._failed: Interrupted | Rejected | None = None
        self.bound = False
        """Its turn has tokens, and they are to be of one version: a move of the weights ends it."""
        self.request_id: str | None = None
        """As the engine calls the request; known with its first chunk."""

    def cut(self, end: End, detail: str) -> None:
        """End it now: its reader gets `Interrupted(end)`. The first cut counts."""
        if self._cut is not None:
            return
        self._cut = Interrupted(end, detail)
        if self._opening is not None:
            self._opening.cancel()
        elif self._response is not None:
            self._response.content.set_exception(self._cut)

    async def open(  # noqa: PLR0913 - one request
        self,
        http: aiohttp.ClientSession,
        address: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        path: str = PATH,
        after_s: float = 0.0,
    ) -> None:
        """Wait `after_s`, send the request and read the status; raises Interrupted, Rejected, Overloaded."""
        with self._opened():
            if after_s > 0.0:
                await anyio.sleep(after_s)
            self._response = await self._post(http, address + path, body, headers)
            if self._response.status != 200:
                await self._refused(self._response)

    async def ask(
        self,
        http: aiohttp.ClientSession,
        address: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        path: str = PATH,
    ) -> bytes:
        """The whole answer to another request of the same attempt, beside its own; raises as `open` does."""
        with self._opened():
            response = await self._post(http, address + path, body, headers)
            if response.status != 200:
                await self._refused(response)
            try:
                return await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise Interrupted(End.RESET, _named(error)) from error
        raise AssertionError("a cut raises")

    @contextmanager
    def _opened(self) -> Generator[None]:
        """What is sent in this block ends with a cut, and is watched for silence."""
        if self._cut is not None:
            raise self._cut
        self._watch()
        with anyio.CancelScope() as self._opening:
            self._waiting_since = self._loop.time()
            yield
        self._opening = self._waiting_since = None
        if self._cut is not None:
            raise self._cut

    async def _post(
        self, http: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        try:
            try:
                return await http.post(url, data=body, headers=headers)
            except aiohttp.ServerDisconnectedError:
                # A kept-alive connection that the server had closed looks like this too; a fresh one tells.
                return await http.post(url, data=body, headers=headers)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError, aiohttp.InvalidURL) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise Overloaded(0.0, f"{url}: {error}", end=End.EXHAUSTED) from error
            raise Interrupted(End.REFUSED, f"{url}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(End.RESET, f"{url}: {_named(error)}") from error

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        try:
            body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(End.SERVER_ERROR, f"status {status}, then {_named(error)}") from error
        retry_after = response.headers.get("Retry-After")
        if status == 429 or (status == 503 and retry_after is not None):
            raise Overloaded(_seconds(retry_after), f"status {status}: {_text(body)}")
        if 400 <= status < 500 or status == 501:
            raise Rejected(status, body)
        raise Interrupted(End.SERVER_ERROR, f"status {status}: {_text(body)}")

    async def read(self) -> list[Chunk]:
        """The chunks that came since, at least one; raises Interrupted or Rejected when there are no more."""
        assert self._response is not None, "read after open"
        content = self._response.content
        while self._failed is None:
            self._waiting_since = self._loop.time()
            try:
                data = await content.readany()
                payloads = self._events.feed(data)
            except EventTooLong as error:
                raise Interrupted(End.MALFORMED, str(error)) from error
            except (aiohttp.ClientError, OSError) as error:
                raise Interrupted(End.RESET, _named(error)) from error
            finally:
                self._waiting_since = None
            if not data:
                self._failed = Interrupted(End.EOF, "the body ended before a finish reason")
            elif chunks := self._chunks(payloads):
                return chunks
        raise self._failed

    def _chunks(self, payloads: list[bytes]) -> list[Chunk]:
        """Those before the first failure, which is raised by the read after them."""
        chunks: list[Chunk] = []
        try:
            for payload in payloads:
                chunk = self._done() if payload == _DONE else self._chunk(payload)
                chunks.append(chunk)
        except (Interrupted, Rejected) as failed:
            self._failed = failed
        return chunks

    def _done(self) -> Chunk:
        """The end mark, which nobody who has a finish reason waits for."""
        raise Interrupted(End.DONE_WITHOUT_FINISH, "[DONE] came before a finish reason")

    def _decode(self, payload: bytes) -> Chunk:
        return self._decoder.decode(payload)

    def _chunk(self, payload: bytes) -> Chunk:
        try:
            chunk = self._decode(payload)
        except msgspec.MsgspecError as error:
            raise Interrupted(End.MALFORMED, f"{error}: {_text(payload)}") from error
        if chunk.error is not None:
            failure = chunk.error if isinstance(chunk.error, Failure) else Failure(chunk.error)
            if isinstance(failure.code, int) and 400 <= failure.code < 500:
                raise Rejected(failure.code, payload)
            raise Interrupted(End.ERROR_FRAME, failure.message[:_SHOWN])
        if self.request_id is None:
            self.request_id = chunk.request_id
        return chunk

    async def rest(self) -> bytes:
        """All that the body still has, for an answer that is no stream; raises Interrupted."""
        assert self._response is not None, "rest after open"
        self._waiting_since = self._loop.time()
        try:
            return await self._response.content.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(End.RESET, _named(error)) from error
        finally:
            self._waiting_since = None

    async def finish(self, within_s: float) -> None:
        """After a finish reason: read the rest, so that the connection can be used again."""
        assert self._response is not None, "finish after open"
        with anyio.move_on_after(within_s):
            try:
                while await self._response.content.readany():
                    pass
            except (Interrupted, aiohttp.ClientError, OSError):
                return  # the turn is whole; only the connection is lost

    def close(self) -> None:
        """Let go of the connection; one in the middle of an answer is closed, which aborts the request."""
        if self._timer is not None:
            self._timer.cancel()
        if self._response is not None:
            self._response.release() if self._response.content.at_eof() else self._response.close()

    # --- no byte for too long ----------------------------------------------------------------------

    def _watch(self) -> None:
        if self._idle_s is not None and self._timer is None:
            self._timer = self._loop.call_later(self._idle_s, self._look)

    def _look(self) -> None:
        """Runs once an idle time, not once a chunk. A caller that reads slowly is not an idle engine."""
        assert self._idle_s is not None
        now = self._loop.time()
        since = now if self._waiting_since is None else self._waiting_since
        if now - since >= self._idle_s:
            self.cut(End.IDLE, f"no byte for {self._idle_s:g} s")
        else:
            self._timer = self._loop.call_at(since + self._idle_s, self._look)


def _seconds(retry_after: str | None) -> float:
    """Retry-After in seconds; one in its other form, a date, reads as one second."""
    try:
        return max(0.0, float(retry_after or ""))
    except ValueError:
        return 1.0


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _text(body: bytes) -> str:
    return body[: 4 * _SHOWN].decode("utf-8", "replace")[:_SHOWN]
