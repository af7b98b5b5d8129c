"""What the ranks of one trainer do together: arrive, wait, export and leave as one.

The order of a call is the same on all of them: everybody arrives; rank 0 says one word after the other, and
each is answered by all; `Over` ends it. Nobody enters a collective of the application before rank 0 has said
so, and it says so when everybody is inside relight. An exception of one rank ends the call on all.
"""

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from relight.agents.trainer import words
from relight.agents.trainer.members import Members
from relight.agents.trainer.ranks import RankFailed, Ranks, RanksLost
from relight.agents.trainer.sync import Answer, Left, WeightSync, told
from relight.agents.trainer.transports import Transports
from relight.agents.trainer.words import Arrival, Beat, Begun, Export, Named, Over, Result, Status
from relight.events.decisions import SyncWeights
from relight.events.errors import UsageError
from relight.events.values import Member

BEAT_S = 1.0
"""Between two words of rank 0 while nothing happens: a rank that failed is noticed within it."""
LAST_S = 0.05
"""How long the others keep their answer back once rank 0 is done: an export may be asked for meanwhile."""


T = TypeVar("T")


class Arrived(NamedTuple):
    """Everybody has come to the same call."""

    fit: bool
    """Whether the live parameters of every rank are the version."""


class Crew:
    """The ranks as a session of one of them uses them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.alone = ranks.size == 1
        self.leads = ranks.rank == 0
        self.beat_s = None if self.alone else BEAT_S
        self._inside = False

    # --- on every rank -----------------------------------------------------------------------------

    def arrive(self, call: str, step: int | None, *, fit: bool, error: Exception | None = None) -> Arrived:
        """Wait for everybody, before anything is opened. Raises `error`, or what others came with."""
        if self.alone:
            if error is not None:
                raise error
            return Arrived(fit)
        mine = Arrival(call=call, step=step, fit=fit, error=told(error))
        arrivals = [words.read(data, Arrival) for data in self.ranks.gather(words.written(mine))]
        if error is not None:
            raise error
        _raise_failed({rank: one.error for rank, one in enumerate(arrivals) if one.error is not None})
        if len({(one.call, one.step) for one in arrivals}) > 1:
            here = ", ".join(f"rank {rank}: {one.call}({one.step})" for rank, one in enumerate(arrivals))
            raise UsageError(f"the ranks of this trainer do not make the same call: {here}")
        self._inside = True
        return Arrived(all(one.fit for one in arrivals))

    @contextmanager
    def inside(self) -> Generator[None]:
        """The part of a call in which the others wait for this rank: they hear of its early end at once."""
        try:
            yield
        except BaseException as error:
            if self._inside and not self.alone:
                if self.leads and isinstance(error, Exception) and not isinstance(error, RanksLost):
                    self.over({0: told(error)})
                else:
                    self._inside = False
                    self.ranks.close()
            raise

    def leave(self) -> None:
        """The session ends here. Every rank comes to this, or is missed by the others."""
        if not self.alone:
            self.ranks.gather(b"")
            self.ranks.close()

    def begin(self, begun: Begun) -> Begun:
        """The session's run, from rank 0."""
        return words.read(self.ranks.tell(words.written(begun)), Begun)

    # --- on rank 0 ---------------------------------------------------------------------------------

    def is_over(self, ending: "Future[Any]") -> bool:
        """Whether `ending` and its like on every rank have come; then nobody is inside any more.

        Raises RankFailed where another rank's has failed.
        """
        if self.alone:
            return ending.done()
        failed: dict[int, str] = {}
        mine = _status(ending)
        if mine.error is None:
            statuses = self._ask(Beat(within_s=LAST_S if mine.done else 0.0), Status)
            failed = {rank: one.error for rank, one in enumerate(statuses) if one.error is not None}
            if not failed and not (mine.done and all(one.done for one in statuses)):
                return False
        else:
            failed[0] = mine.error
        self.over(failed)
        _raise_failed({rank: error for rank, error in failed.items() if rank != 0})
        return True

    def beat(self) -> None:
        """Let the others know that there is nothing to do yet."""
        if not self.alone:
            self._ask(Beat(), Status)

    def over(self, failed: Mapping[int, str] | None = None) -> None:
        """End the call on every rank."""
        self._inside = False
        if not self.alone:
            self.ranks.tell(words.said(Over(failed=dict(failed or {}))))

    def export(self, sync: WeightSync, order: SyncWeights, left: Left) -> Answer:
        """Export with all ranks, where the transport needs them. Raises what it raises, RankFailed."""
        if self.alone or not sync.joint(order.version):
            return sync.export(order, left)
        self.ranks.tell(words.said(Export(order=order, left=tuple(left.before), snapshots=not sync.pushes)))
        answer, error = _tried(lambda: sync.export(order, left))
        outcomes = self._exchange(Status(done=True, error=told(error)), Status)
        if error is not None:
            raise error
        _raise_failed({rank: one.error for rank, one in enumerate(outcomes) if one.error is not None})
        assert answer is not None, "an export that raises nothing has an answer"
        return answer

    def name(self, members: tuple[Member, ...]) -> None:
        """Tell the others who is to be reached in the application's own sync."""
        if not self.alone:
            self.ranks.tell(words.said(Named(members=members)))

    def results(self, members: Members, error: Exception | None) -> None:
        """Who failed in the application's own sync: `members` is told by every rank's.

        Raises RankFailed on rank 0; the others hear of it in the word that ends the call.
        """
        if self.alone:
            return
        mine = Result(failed=members.errors, error=told(error))
        results = self._exchange(mine, Result)
        for one in results:
            for engine, why in one.failed.items():
                members.fail(engine, why)
        if error is None and self.leads:
            _raise_failed({rank: one.error for rank, one in enumerate(results) if one.error is not None})

    # --- on the others -----------------------------------------------------------------------------

    def follow(self, ending: "Future[Any]", transports: Transports) -> None:
        """Do what rank 0 says until it ends the call; `ending` is this rank's own part of it.

        Raises RankFailed where another rank's part has failed and this one's has not.
        """
        word = self._hear(ending, transports)
        assert isinstance(word, Over), "who arrives together makes the same call"
        self._left(word, ending)

    def named(self) -> tuple[Member, ...]:
        """The members of the application's own sync; raises RankFailed."""
        word = self._hear(Future(), Transports())
        if isinstance(word, Named):
            return word.members
        self._left(word, Future())
        return ()

    def _left(self, over: Over, ending: "Future[Any]") -> None:
        self._inside = False
        mine = _status(ending).error
        if mine is None:
            _raise_failed(over.failed)

    def _hear(self, ending: "Future[Any]", transports: Transports) -> Named | Over:
        while True:
            match words.heard(self.ranks.tell(b"")):
                case Beat(within_s=within_s):
                    wait([ending], within_s)
                    self._exchange(_status(ending), Status)
                case Export() as export:
                    sync = transports.recoveries if export.snapshots else transports.ordinary
                    assert sync is not None, "the ranks were given the same transports"
                    self._join(sync, export)
                case Named() | Over() as word:
                    return word

    def _join(self, sync: WeightSync, export: Export) -> None:
        members = export.order.members
        left = Left(members, lambda member: member.engine in export.left)
        _, error = _tried(lambda: sync.join(export.order, left))
        self._exchange(Status(done=True, error=told(error)), Status)

    # --- words -------------------------------------------------------------------------------------

    def _ask(self, beat: Beat, kind: type[Status]) -> list[Status]:
        self.ranks.tell(words.said(beat))
        return self._exchange(Status(done=True), kind)

    def _exchange(self, mine: words.S, kind: type[words.S]) -> list[words.S]:
        return [words.read(data, kind) for data in self.ranks.gather(words.written(mine))]


def _tried(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `do` returns, or raises: the others wait to hear which. A rank that is lost is told to nobody."""
    try:
        return do(), None
    except RanksLost:
        raise
    except Exception as error:  # noqa: BLE001 -- raised again by the caller, after all ranks know of it
        return None, error


def _status(ending: "Future[Any]") -> Status:
    if not ending.done():
        return Status(done=False)
    return Status(done=True, error="cancelled" if ending.cancelled() else told(ending.exception()))


def _raise_failed(failed: Mapping[int, str]) -> None:
    if failed:
        raise RankFailed("; ".join(f"rank {rank}: {error}" for rank, error in sorted(failed.items())))
