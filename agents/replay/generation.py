"""One turn, from its first request to its last token, over as many attempts as it takes.

`step` does one thing at a time: begin an attempt, or take what came. So the one who drives it decides the
pace, and may stop between any two steps; `close` then leaves nothing behind.
"""

from collections.abc import Iterator
from typing import NamedTuple

import aiohttp
import anyio

from relight.agents.replay import failures
from relight.agents.replay.aloft import Aloft, take_off
from relight.agents.replay.checking import measured
from relight.agents.replay.dispatch import Dispatch
from relight.agents.replay.gate import Gate, Late
from relight.agents.replay.ledger import Ledger, News
from relight.agents.replay.limits import FINISH_S, SUSPECTED, UNHEARD, Call, Limits
from relight.agents.replay.request import Tokens
from relight.agents.replay.route import Boarded, Key, Route, Wanted
from relight.agents.replay.speech import Errand, Speech
from relight.agents.replay.strand import WHOLE, Malformed
from relight.agents.replay.stream import Interrupted, Overloaded, Rejected
from relight.agents.replay.tally import Account, Outcome
from relight.agents.replay.toll import Toll
from relight.agents.replay.turn import Attempt, End, Piece, ReplayError, Turn
from relight.agents.replay.wire import Chunk

ABORTED = "aborted by the caller"


class Brought(NamedTuple):
    """What one step brought, by whom."""

    news: list[News]
    key: Key
    attempt: int

    def pieces(self) -> Iterator[Piece]:
        for news in self.news:
            yield Piece(*news, self.key.engine, self.key.incarnation, self.attempt)


class Generation:
    """One turn on its way. Used by one task at a time; `abort` by any other of the same loop."""

    def __init__(  # noqa: PLR0913 - what a turn is made of
        self,
        dispatch: Dispatch,
        http: aiohttp.ClientSession,
        ledger: Ledger,
        call: Call,
        limits: Limits,
        *,
        speech: Speech | None = None,
    ) -> None:
        self.done = False
        self._dispatch = dispatch
        self._http = http
        self._ledger = ledger
        self._speech = speech or Tokens(ranked=ledger.ranked)
        self._call = call
        self._limits = limits
        self._toll = Toll(limits.max_engine_failures)
        self._gate = Gate(dispatch, limits, self._toll)
        self._aloft: Aloft | None = None
        self._attempts: list[Attempt] = []
        self._aborted = False
        self._outcome: Outcome | None = None
        self._broken_at: float | None = None
        self._gaps_s: list[float] = []

    def turn(self) -> Turn:
        """What there is so far."""
        return Turn(
            request_id=self._call.request_id,
            choices=self._ledger.choices(),
            attempts=tuple(self._attempts),
        )

    def account(self) -> Account:
        """The turn as it is counted; to be taken once, at its end."""
        outcome = self._outcome or (Outcome.COMPLETE if self.done else Outcome.ABANDONED)
        return Account(self.turn(), outcome, self._ledger.taken, self._toll.suspect, tuple(self._gaps_s))

    @property
    def request_id(self) -> str:
        return self._call.request_id

    @property
    def attempt(self) -> int:
        """Number of the attempt under way, from 0."""
        return len(self._attempts)

    async def step(self) -> Brought | None:
        """Go on by one step; what it brought, if anything. Raises ReplayError. Not once `done`."""
        if self._aloft is None:
            if self._aborted:
                self._stop()
            elif self._ledger.settle():
                self.done = True
            else:
                await self._begin()
            return None
        try:
            chunks = await self._aloft.flight.read()
        except Interrupted as cut:
            await self._interrupted(cut.end, cut.detail)
            return None
        except Rejected as rejected:
            await self._rejected(rejected)
            return None
        brought, end = self._take(self._aloft, chunks)
        if self._ledger.complete:
            await self._completed()
        elif end is not None:
            await self._interrupted(*end)
        return brought

    def _take(self, aloft: Aloft, chunks: list[Chunk]) -> tuple[Brought | None, tuple[End, str] | None]:
        """What the chunks brought, and the end of the attempt where they show one."""
        brought = Brought([], aloft.boarded.route.key, len(self._attempts))
        end: tuple[End, str] | None = None
        try:
            for chunk in chunks:
                for delta in chunk.choices:
                    if (news := self._ledger.feed(delta)) is not None:
                        brought.news.append(news)
                    if delta.finish_reason is not None:
                        end = end or _unasked(delta.finish_reason)
        except Malformed as malformed:
            if malformed.whole:
                self._ledger.reject()
                brought.news.clear()
            end = (End.MALFORMED, str(malformed))
        if not brought.news:
            return None, end
        if aloft.first_token_s is None:
            self._first_token(aloft)
        return brought, end

    def _first_token(self, aloft: Aloft) -> None:
        now = anyio.current_time()
        aloft.first_token_s = now - aloft.began
        aloft.flight.bound = self._ledger.bound
        self._gate.passed()
        self._toll.progressed()
        self._dispatch.seated(aloft.boarded)
        if self._broken_at is not None:
            self._gaps_s.append(now - self._broken_at)
            self._broken_at = None

    # --- beginning an attempt ------------------------------------------------------------------------

    async def _begin(self) -> None:
        wanted = Wanted(
            self._call.session, self._toll.avoid, replays=bool(self._attempts), suspect=self._toll.suspect
        )
        found = await self._gate.route(wanted)
        if isinstance(found, Late):
            raise self._failed(failures.late(found, self._limits, self.turn()))
        if found is None:
            return  # aborted
        aloft = self._board(found, wanted)
        put_off_s = self._dispatch.spread_s() if wanted.replays else 0.0
        try:
            await self._check_seam(aloft)
            errand = Errand(
                self._http,
                found.address,
                found.key,
                self._call,
                aloft.ask,
                aloft.request_id,
                after_s=put_off_s,
            )
            await self._speech.send(aloft.flight, errand)
        except Interrupted as cut:
            await self._interrupted(cut.end, cut.detail)
        except Overloaded as busy:
            await self._interrupted(busy.end, str(busy), rest_s=busy.retry_after_s)
        except Rejected as rejected:
            await self._rejected(rejected)

    def _board(self, route: Route, wanted: Wanted) -> Aloft:
        flight = self._speech.flight(idle_s=self._limits.idle_timeout_s)
        boarded = self._dispatch.board(route, wanted, flight)
        ask = self._ledger.ask(attempt=self.attempt, version=str(route.version))
        request_id = f"{self._call.request_id}-{self.attempt}"
        self._aloft = take_off(flight, boarded, ask, request_id=request_id, deadline=self._gate.deadline)
        flight.bound = self._ledger.bound
        if self._aborted:
            flight.cut(End.CANCELLED, ABORTED)
        return self._aloft

    async def _check_seam(self, aloft: Aloft) -> None:
        """Where that is wanted: have kept tokens replayed that the engine sees too differently."""
        most, version = self._limits.check_seam, str(aloft.boarded.version)
        if most is None or not aloft.ask.kept or not (kept := self._ledger.scored_at(version)):
            return
        seam = await measured(aloft, kept, self._call, http=self._http, most=most)
        aloft.seam_drift = seam.drift
        if seam.too_far is not None:
            self._ledger.distrust(seam.too_far)
            aloft.ask = self._ledger.ask(attempt=self.attempt, version=version)

    # --- ending an attempt ---------------------------------------------------------------------------

    async def _completed(self) -> None:
        assert self._aloft is not None
        boarded = self._aloft.boarded
        doubt = None if self._ledger.told else await self._dispatch.certainty.doubt(boarded)
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
            doubt = await self._dispatch.certainty.doubt_of_kept(boarded)
            try:
                self._close_ledger(boarded, doubt)
            except Malformed:
                self._ledger.reject()
        if end is End.CANCELLED:
            self._stop()
            return
        if end is End.DEADLINE:
            raise self._failed(failures.late(Late.DEADLINE, self._limits, self.turn()))
        self._gate.broken()
        self._broken_at = self._broken_at or anyio.current_time()
        self._toll.count(end, boarded.route.key, rest_s=rest_s, chance=self._dispatch.chance())
        if self._toll.spent:
            raise self._failed(failures.given_up(self._toll, self.turn()))

    async def _rejected(self, rejected: Rejected) -> None:
        """A refusal is the caller's fault, unless the same turn was accepted before without its tokens."""
        assert self._aloft is not None
        if self._aloft.ask.kept:
            self._ledger.distrust(f"refused to be continued: {rejected}")
            await self._interrupted(End.REJECTED, str(rejected))
            return
        self._land(End.REJECTED, str(rejected))
        raise self._failed(failures.refused(rejected, self.turn())) from rejected

    def _close_ledger(self, boarded: Boarded, doubt: str | None) -> None:
        certain = boarded.version if doubt is None else None
        self._ledger.close(certain=certain, floor=boarded.version, doubt=doubt or "")

    def _land(self, end: End, detail: str) -> None:
        """The attempt is over: record it and let go of everything it holds."""
        assert self._aloft is not None
        aloft, self._aloft = self._aloft, None
        self._attempts.append(aloft.land(end, detail, made=self._ledger.made))
        self._dispatch.leave(aloft.boarded, aloft.flight)
        if end in UNHEARD:
            told = aloft.flight.request_id
            names = [told] if told else self._speech.names(aloft.request_id)
            self._dispatch.asides.abort(aloft.boarded.route, names)

    def _failed(self, error: ReplayError) -> ReplayError:
        self._outcome = failures.outcome_of(error)
        return error

    # --- from outside --------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the turn where it is: the next step makes it `done`, with what there is."""
        self._aborted = True
        if self._aloft is not None:
            self._aloft.flight.cut(End.CANCELLED, ABORTED)
        self._gate.abort()

    def _stop(self) -> None:
        self.done, self._outcome = True, Outcome.ABANDONED

    def close(self) -> None:
        """Stop where it is: an attempt under way is aborted."""
        if self._aloft is not None:
            self._land(End.COMPLETE if self.done else End.CANCELLED, "")


def _unasked(finish_reason: str) -> tuple[End, str] | None:
    """The end of an attempt by a finish reason that does not complete the turn."""
    if finish_reason in WHOLE:
        return None
    if finish_reason == "abort":
        return End.ABORTED, "finish reason abort, which nobody here asked for"
    return End.ERROR_FINISH, f"finish reason {finish_reason}"
