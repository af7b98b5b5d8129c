"""A session on a rank that does not speak with the bus: it does what rank 0 says, in the caller's thread.

It makes the same calls as rank 0 in the same order, so that collectives of an export find every rank inside
relight.
"""

from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from relight.agents.trainer.barrier import Phase
from relight.agents.trainer.boundary import Boundary
from relight.agents.trainer.crew import Crew
from relight.agents.trainer.lanes import Lane
from relight.agents.trainer.live import live
from relight.agents.trainer.members import Members
from relight.agents.trainer.ranks import RankFailed, Ranks
from relight.agents.trainer.sync import Context, Left
from relight.agents.trainer.transports import Transports
from relight.agents.trainer.words import Begun
from relight.events.errors import UsageError

T = TypeVar("T")


class Joined:
    """One of the other ranks; its methods are told in `Trainer`."""

    def __init__(self, ranks: Ranks, *, transports: Transports) -> None:
        self._crew = Crew(ranks)
        self._transports = transports
        self._lane = Lane()
        self._live = live(0, transports)
        self.run = 0

    def __enter__(self) -> Self:
        begun = self._crew.begin(Begun())
        if begun.error is not None:
            raise RankFailed(f"rank 0: {begun.error}")
        self.run = begun.run
        self._live = live(self.run, self._transports)
        self._transports.bind(Context(self._crew.ranks))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._crew.leave()
        finally:
            self._crew.ranks.close()
            self._lane.close()
            self._transports.close()

    # --- boundaries ----------------------------------------------------------------------------------

    @overload
    def wait(
        self, fn: Callable[[], Awaitable[T]], *, step: int | None = None, phase: Phase = "rollout"
    ) -> T: ...
    @overload
    def wait(self, fn: Callable[[], T], *, step: int | None = None, phase: Phase = "rollout") -> T: ...
    def wait(
        self, fn: Callable[[], T | Awaitable[T]], *, step: int | None = None, phase: Phase = "rollout"
    ) -> T:
        self._arrive("wait", step)
        work = self._lane.start(fn)
        try:
            self._follow(work.future)
        except BaseException:
            work.cancel()
            raise
        return work.result()

    def boundary(self, step: int, *, phase: Phase = "rollout") -> Boundary:
        return Boundary(enter=lambda: self._arrive("boundary", step), serve=self._follow, leave=lambda: None)

    def swapped(self) -> AbstractContextManager[None]:
        return self._back(self._live.swap())

    @contextmanager
    def _back(self, back: Callable[[], None]) -> Generator[None]:
        yield
        back()

    def _arrive(self, call: str, step: int | None) -> None:
        self._crew.arrive(call, step, fit=self._live.exports(step) is not None)

    def _follow(self, ending: "Future[Any]") -> None:
        with self._crew.inside():
            self._crew.follow(ending, self._transports)

    # --- syncs ---------------------------------------------------------------------------------------

    def sync(self, step: int) -> None:
        if self._transports.ordinary is None:
            raise UsageError("trainer.sync needs a transport: give relight.trainer a sync=")
        self._mark("sync", step)
        self._follow(_ended())

    @contextmanager
    def syncing(self, step: int) -> Generator[Members]:
        self._mark("syncing", step)
        with self._crew.inside():
            named = self._crew.named()
            members = Members(named, Left(named, lambda _: False))
            try:
                yield members
            except Exception as error:
                self._crew.results(members, error)
                self._crew.follow(_ended(error), self._transports)
                raise
            self._crew.results(members, None)
            self._crew.follow(_ended(), self._transports)

    def published(self, step: int, uri: str) -> None:
        """Rank 0 says it."""

    def _mark(self, call: str, step: int) -> None:
        refused: UsageError | None = None
        try:
            self._live.mark(step)
        except UsageError as error:
            refused = error
        self._crew.arrive(call, step, fit=True, error=refused)


def _ended(error: Exception | None = None) -> "Future[Any]":
    """This rank's part of a call, which is over."""
    ending: Future[Any] = Future()
    if error is None:
        ending.set_result(None)
    else:
        ending.set_exception(error)
    return ending
