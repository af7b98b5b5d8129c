"""One turn, from its first request to its last token, over as many attempts as it takes.

`step` does one thing at a time: begin an attempt, or take what came. So the one who drives it decides the
pace, and may stop between any two steps; `close` then leaves nothing behind.
"""

import asyncio
import time
from typing import NamedTuple

import aiohttp
import anyio
import msgspec

from relight.agents.replay.dispatch import Boarded, Dispatch
from relight.agents.replay.ledger import Ask, Ledger
from relight.agents.replay.limits import BACKOFF_S, COUNTED, FINISH_S, POISON, SUSPECTED, Call, Limits
from relight.agents.replay.routes import Route
from relight.agents.replay.strand import WHOLE, Malformed
from relight.agents.replay.stream import Flight, Interrupted, Overloaded, Rejected
from relight.agents.replay.turn import (
    Attempt,
    End,
    Piece,
    PoisonRequestError,
    ReplayError,
    ReplayTimeout,
    RequestRejected,
    Turn,
)
from relight.agents.replay.wire import Chunk
from relight.events.ids import EngineName


class _Aloft(NamedTuple):
    """The attempt under way."""

    flight: Flight
    boarded: Boarded
    ask: Ask
    request_id: str
    began: float
    started_at: float
    timer: asyncio.TimerHandle | None


class Generation:
    """One turn on its way. Used by one task at a time."""

    def __init__(
        self, dispatch: Dispatch, http: aiohttp.ClientSession, ledger: Ledger, call: Call, limits: Limits
    ) -> None:
        self.done = False
        self._dispatch = dispatch
        self._http = http
        self._ledger = ledger
        self._call = call
        self._limits = limits
        self._aloft: _Aloft | None = None
        self._attempts: list[Attempt] = []
        self._first_token_s: float | None = None
        self._failures = 0
        self._avoid: EngineName | None = None
        self._rests = 0
        self._rest_s: float | None = None
        now = anyio.current_time()
        self._deadline = float("inf") if limits.timeout_s is None else now + limits.timeout_s
        self._recover_by: float | None = None

    def turn(self) -> Turn:
        """What there is so far."""
        return Turn(
            request_id=self._call.request_id,
            choices=self._ledger.choices(),
            attempts=tuple(self._attempts),
        )

    @property
    def attempt(self) -> int:
        """Number of the attempt under way, from 0."""
        return len(self._attempts)

    async def step(self) -> list[Piece]:
        """Go on by one step; what it brought. Raises ReplayError. Not to be called when `done`."""
        if self._aloft is None:
            if self._ledger.settle():
                self.done = True
            else:
                await self._begin()
            return []
        try:
            chunks = await self._aloft.flight.read()
        except Interrupted as cut:
            await self._interrupted(cut.end, cut.detail)
            return []
        except Rejected as rejected:
            raise self._rejected(rejected) from rejected
        pieces, end = self._take(self._aloft, chunks)
        if self._ledger.complete:
            await self._completed()
        elif end is not None:
            await self._interrupted(*end)
        return pieces

    def _take(self, aloft: _Aloft, chunks: list[Chunk]) -> tuple[list[Piece], tuple[End, str] | None]:
        """What the chunks brought, and the end of the attempt where they show one."""
        key = aloft.boarded.route.key
        pieces: list[Piece] = []
        end: tuple[End, str] | None = None
        try:
            for chunk in chunks:
                for delta in chunk.choices:
                    if (news := self._ledger.feed(delta)) is not None:
                        pieces.append(Piece(*news, key.engine, key.incarnation, self.attempt))
                    end = end or _unasked(delta.finish_reason)
        except Malformed as malformed:
            if malformed.whole:
                self._ledger.reject()
                pieces.clear()
            end = (End.MALFORMED, str(malformed))
        if pieces and self._first_token_s is None:
            self._first_token_s = anyio.current_time() - aloft.began
            self._recover_by = None
        return pieces, end

    # --- beginning an attempt ------------------------------------------------------------------------

    async def _begin(self) -> None:
        route = await self._route()
        if not self._attempts:
            self._recover_by = None  # nothing has failed yet
        aloft = self._board(route)
        body = msgspec.json.encode(
            {
                **self._call.extra,
                "request_id": aloft.request_id,
                "token_ids": aloft.ask.token_ids,
                "sampling_params": aloft.ask.sampling_params,
                "stream": True,
            }
        )
        headers = {
            **self._call.headers,
            "Content-Type": "application/json",
            "X-Request-Id": aloft.request_id,
        }
        if self._call.session is not None:
            headers.setdefault("X-Session-ID", self._call.session)
        try:
            await aloft.flight.open(self._http, route.address, body, headers)
        except Interrupted as cut:
            await self._interrupted(cut.end, cut.detail)
        except Overloaded as busy:
            await self._interrupted(End.OVERLOADED, str(busy), rest_s=busy.retry_after_s)
        except Rejected as rejected:
            raise self._rejected(rejected) from rejected

    async def _route(self) -> Route:
        """A route, waited for within the turn's deadlines; an engine that was busy is left alone a while."""
        now = anyio.current_time()
        if self._recover_by is None:
            self._recover_by = now + self._limits.recovery_timeout_s
        with anyio.move_on_after(min(self._deadline, self._recover_by) - now):
            if self._rest_s is not None and self._avoid is not None:
                with anyio.move_on_after(self._rest_s):
                    await self._dispatch.other_than(self._avoid)
                self._rest_s = None
            return await self._dispatch.route(session=self._call.session, avoid=self._avoid)
        if self._deadline <= self._recover_by:
            raise self._timed_out()
        raise ReplayTimeout(
            f"no route within {self._limits.recovery_timeout_s:g} s{self._so_far()}", self.turn()
        )

    def _board(self, route: Route) -> _Aloft:
        flight = Flight(ranked=self._ledger.ranked, idle_s=self._limits.idle_timeout_s)
        boarded = self._dispatch.board(route, flight)
        self._first_token_s = None
        timer: asyncio.TimerHandle | None = None
        if self._limits.timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(
                self._deadline, flight.cut, End.DEADLINE, "the caller's timeout_s has passed"
            )
        self._aloft = _Aloft(
            flight,
            boarded,
            self._ledger.ask(attempt=self.attempt, version=str(route.version)),
            f"{self._call.request_id}-{self.attempt}",
            anyio.current_time(),
            time.time(),
            timer,
        )
        return self._aloft

    # --- ending an attempt ---------------------------------------------------------------------------

    async def _completed(self) -> None:
        assert self._aloft is not None
        boarded = self._aloft.boarded
        doubt = None if self._ledger.told else await self._dispatch.doubt(boarded)
        try:
            self._close_ledger(boarded, doubt)
        except Malformed as malformed:
            self._ledger.reject()
            await self._interrupted(End.MALFORMED, str(malformed))
            return
        if self._ledger.moved:
            self._ledger.restart()
            await self._interrupted(End.VERSION_MOVED, "the weights changed under way")
            return
        self.done = True
        await self._aloft.flight.finish(FINISH_S)
        self._land(End.COMPLETE, "")

    async def _interrupted(self, end: End, detail: str, *, rest_s: float = 0.0) -> None:
        """The attempt has ended and the turn has not; raises ReplayError where that is the turn's end too."""
        assert self._aloft is not None
        boarded = self._aloft.boarded
        self._land(end, detail)
        if end in SUSPECTED:
            self._dispatch.suspect(boarded.route, f"{end}: {detail}")
        if self._ledger.made:
            doubt = await self._dispatch.doubt(boarded)
            try:
                self._close_ledger(boarded, doubt)
            except Malformed:
                self._ledger.reject()
        if end is End.DEADLINE:
            raise self._timed_out()
        if self._recover_by is None:
            self._recover_by = anyio.current_time() + self._limits.recovery_timeout_s
        if end is not End.VERSION_MOVED:
            self._avoid = boarded.route.key.engine
        if end in (End.OVERLOADED, End.ABORTED):
            self._rest_s = max(rest_s, BACKOFF_S[min(self._rests, len(BACKOFF_S) - 1)])
            self._rests += 1
        if end in COUNTED:
            self._failures += 1
            if self._failures >= self._limits.max_engine_failures:
                raise self._given_up()

    def _close_ledger(self, boarded: Boarded, doubt: str | None) -> None:
        certain = boarded.version if doubt is None else None
        self._ledger.close(certain=certain, floor=boarded.version, doubt=doubt or "")

    def _land(self, end: End, detail: str) -> None:
        """The attempt is over: record it and let go of everything it holds."""
        assert self._aloft is not None
        flight, boarded, ask, request_id, began, started_at, timer = self._aloft
        self._aloft = None
        if timer is not None:
            timer.cancel()
        flight.close()
        self._dispatch.leave(boarded.route, flight)
        if end in (End.CANCELLED, End.DEADLINE, End.FENCED, End.IDLE):
            names = (
                [flight.request_id] if flight.request_id else [request_id, f"generate-tokens-{request_id}"]
            )
            self._dispatch.abort(boarded.route, names)
        self._attempts.append(
            Attempt(
                engine=boarded.route.key.engine,
                incarnation=boarded.route.key.incarnation,
                version=str(boarded.version),
                request_id=request_id,
                kept=ask.kept,
                sent=len(ask.token_ids),
                max_tokens=ask.sampling_params.get("max_tokens"),
                made=self._ledger.made,
                restarted=ask.restarted,
                reason=end,
                detail=detail,
                started_at=started_at,
                first_token_s=self._first_token_s,
                seconds=anyio.current_time() - began,
            )
        )

    def close(self) -> None:
        """Stop where it is: an attempt under way is aborted."""
        if self._aloft is not None:
            end = End.COMPLETE if self.done else End.CANCELLED
            self._land(end, "")

    # --- errors --------------------------------------------------------------------------------------

    def _rejected(self, rejected: Rejected) -> ReplayError:
        self._land(End.REJECTED, str(rejected))
        last = self._attempts[-1]
        return RequestRejected(
            f"{last.engine}.{last.incarnation} refused the request: {rejected}",
            self.turn(),
            status=rejected.status,
            body=rejected.body,
        )

    def _timed_out(self) -> ReplayError:
        return ReplayTimeout(f"not complete within {self._limits.timeout_s:g} s{self._so_far()}", self.turn())

    def _given_up(self) -> ReplayError:
        message = f"given up after {self._failures} engine failures{self._so_far()}"
        if self._failures >= POISON:
            return PoisonRequestError(f"{message}; the request may be their cause", self.turn())
        return ReplayError(message, self.turn())

    def _so_far(self) -> str:
        turn = self.turn()
        ends = ", ".join(f"{each.engine}.{each.incarnation} {each.reason}" for each in turn.attempts)
        return f"; {len(turn.token_ids)} tokens so far; attempts: {ends or 'none'}"


def _unasked(finish_reason: str | None) -> tuple[End, str] | None:
    """The end of an attempt by a finish reason that does not complete the turn."""
    if finish_reason is None or finish_reason in WHOLE:
        return None
    if finish_reason == "abort":
        return End.ABORTED, "finish reason abort, which nobody here asked for"
    return End.ERROR_FINISH, f"finish reason {finish_reason}"
