"""One run of a trainer: its boundaries and syncs, on a bus.

Weights are touched in the application's thread (or a boundary's export thread) only, and only while a
boundary is open. Whatever happens to the bus or the orchestrator, a call here ends: with the weights
synced, with them knowingly not synced, or with an error that says so. This is rank 0 of the trainer; the
others are in `joined`.
"""

import logging
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from relight.agents.snapshot import directory_of
from relight.agents.trainer.alone import Alone
from relight.agents.trainer.barrier import Closed, Ended, Moved, Opened, Phase
from relight.agents.trainer.boundary import Boundary
from relight.agents.trainer.crew import Crew
from relight.agents.trainer.export import Exporter
from relight.agents.trainer.gate import Gate
from relight.agents.trainer.lanes import Lane
from relight.agents.trainer.link import Link
from relight.agents.trainer.live import live
from relight.agents.trainer.members import Members
from relight.agents.trainer.patience import End, OrchestratorLost, Patience
from relight.agents.trainer.ranks import Ranks, RanksLost
from relight.agents.trainer.settings import Settings
from relight.agents.trainer.snapshot import adopt
from relight.agents.trainer.sync import Context, Left, refusal, told
from relight.agents.trainer.transports import Transports
from relight.agents.trainer.words import Begun
from relight.events.decisions import SyncWeights
from relight.events.errors import UsageError
from relight.events.facts import Fact, JobFinished, WeightsPublished
from relight.events.ids import job_name
from relight.events.version import Version

log = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_AFTER_ERROR_S = 1.0
"""An application that ends by an exception is not held for its last facts: its silence tells."""


class Run:
    """A session that is connected; its methods are told in `Trainer`."""

    def __init__(
        self, url: str, *, job: str, transports: Transports, settings: Settings, ranks: Ranks
    ) -> None:
        ordinary = transports.ordinary
        self._transports = transports
        self._settings = settings
        self._gate = Gate(ordinary, say=self._say)
        self._link = Link(url, job_name(job), listener=self._gate)
        self._crew = Crew(ranks)
        self._exporter = Exporter(self._gate, self._crew, transports)
        self._alone = Alone(settings, pushes=ordinary is None or ordinary.pushes)
        self._lane = Lane()
        self._live = live(0, transports)
        self._announced: Version | None = None
        self._life: Literal["before", "within", "after"] = "before"

    def _say(self, fact: Fact) -> None:
        self._link.say(fact)

    def __enter__(self) -> Self:
        if self._life != "before":
            raise UsageError("a trainer's session is entered once: relight.trainer gives another one")
        try:
            run = self._link.start(within_s=self._settings.connect_s)
        except Exception as error:
            self._crew.begin(Begun(error=told(error)))
            raise
        self._crew.begin(Begun(run=run))
        self._live = live(run, self._transports)
        self._transports.bind(Context(self._crew.ranks, self._in_use))
        self._life = "within"
        return self

    def _is_within(self, call: str) -> None:
        if self._life != "within":
            raise UsageError(f"trainer.{call} is called {self._life} `with relight.trainer(…) as trainer:`")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life = "after"
        lost = self._leave_ranks() if kind is None else None
        clean = kind is None and lost is None
        if kind is not None:
            self._crew.ranks.close()
        if clean:
            self._say(JobFinished(run=self.run))
        flush_s = self._settings.flush_s if clean else FLUSH_AFTER_ERROR_S
        if not self._link.stop(flush_s=flush_s, clean=clean):
            log.warning("trainer ends with facts unsent", extra={"run": self.run, "clean": clean})
        self._lane.close()
        self._transports.close()
        if lost is not None:
            raise lost

    def _leave_ranks(self) -> RanksLost | None:
        """The end is clean only where it is on every rank."""
        try:
            self._crew.leave()
        except RanksLost as lost:
            return lost
        return None

    @property
    def run(self) -> int:
        return self._gate.barrier.run

    def _in_use(self) -> frozenset[Version]:
        uses = self._gate.barrier.uses.values()
        return frozenset(use.version for use in uses if self._link.seconds_until(use.deadline) > 0)

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
        opened = self._stale("wait", step, phase)
        with self._crew.inside():
            self._gate.turn(opened)
            try:
                work = self._lane.start(fn)
                try:
                    self._serve(work.future)
                except BaseException:
                    work.cancel()
                    raise
                return work.result()
            finally:
                self._gate.turn(Closed())

    def boundary(self, step: int, *, phase: Phase = "rollout") -> Boundary:
        return Boundary(
            enter=lambda: self._gate.turn(self._stale("boundary", step, phase)),
            serve=self._serve,
            leave=lambda: self._gate.turn(Closed()),
        )

    def _serve(self, ending: "Future[Any]") -> None:
        """Export what recoveries ask for, until `ending` and its like on every rank have come."""
        ending.add_done_callback(lambda _: self._gate.poke())
        with self._crew.inside():
            while True:
                order = self._gate.next_order(until=ending.done, within_s=self._crew.beat_s)
                if order is None and not self._crew.alone:  # the others' part may not have ended yet
                    order = self._gate.take()
                if order is not None:
                    self._exporter.run(order)
                elif self._crew.is_over(ending):
                    return

    def _stale(self, call: str, step: int | None, phase: Phase) -> Opened:
        self._is_within(call)
        exports = self._live.exports(step)
        if not self._crew.arrive(call, step, fit=exports is not None).fit:
            exports = None
        known = [version for version in (self._live.version, self._announced) if version is not None]
        version = max(known, default=Version(self.run, step or 0))
        return Opened(
            version.step if step is None else step,
            version,
            exports,
            "stale",
            phase,
            pulls=self._transports.snapshots is not None,
        )

    def swapped(self) -> AbstractContextManager[None]:
        self._is_within("swapped")
        back = self._live.swap()
        self._move()
        return self._back(back)

    @contextmanager
    def _back(self, back: Callable[[], None]) -> Generator[None]:
        """An exception leaves them swapped: nobody can say what the model holds."""
        yield
        back()
        self._move()

    def _move(self) -> None:
        """Say what an open boundary exports now, where that has changed."""
        with self._gate.changed:
            here = self._gate.barrier
            if here.open and here.opening is not None:
                exports = self._live.exports(here.opening.step)
                if exports != here.opening.exports:
                    self._gate.turn(Moved(exports))

    # --- syncs ---------------------------------------------------------------------------------------

    def sync(self, step: int) -> None:
        sync = self._transports.ordinary
        if sync is None:
            raise UsageError("trainer.sync needs a transport: give relight.trainer a sync=")
        version = self._marked("sync", step, refused=self._unfit())
        exported, failures = False, 0
        with self._full(version) as patience:
            while isinstance(order := self._next(patience), SyncWeights):
                error = self._exporter.run(order)
                exported = exported or error is None
                failures += error is not None
                # What a failed push touched is restarted and asked for again, once; a write just fails.
                if error is not None and (not sync.pushes or failures > 1):
                    raise error
            if self._goes_on(order) and not exported and (published := self._exporter.alone(version)):
                self._say(published)
            if beside := self._exporter.beside(version):
                self._say(beside)

    @contextmanager
    def syncing(self, step: int) -> Generator[Members]:
        with self._full(self._marked("syncing", step)) as patience:
            order = self._next(patience)
            if isinstance(order, SyncWeights):
                members = Members(order.members, Left(order.members, self._gate.is_gone))
            else:
                members = self._last_members() if self._goes_on(order) else _nobody()
            self._crew.name(tuple(members))
            try:
                try:
                    yield members
                except Exception as error:
                    self._crew.results(members, error)
                    raise
                self._crew.results(members, None)
            except BaseException as error:
                if isinstance(order, SyncWeights):
                    self._gate.turn(Ended(refusal(order, told(error), touched=True)))
                raise
            if not isinstance(order, SyncWeights):
                return
            self._gate.turn(Ended(members.answer(order)))
            while isinstance(late := self._next(patience), SyncWeights):
                self._gate.turn(Ended(refusal(late, f"{late.version} was synced by the application already")))
            self._alone.synced()

    def published(self, step: int, uri: str) -> None:
        self._is_within("published")
        version = Version(self.run, step)
        digest = adopt(directory_of(uri), version)
        self._announced = max(version, self._announced or version)
        self._say(WeightsPublished(version=version, uri=uri, digest=digest))

    def _unfit(self) -> UsageError | None:
        """Why recoveries could never give the weights that are about to be pushed to a replacement."""
        ordinary = self._transports.ordinary
        pushes = ordinary is not None and ordinary.pushes and self._transports.snapshots is None
        if not (pushes and self._gate.barrier.recover_at == "snapshot"):
            return None
        return UsageError(
            'the orchestrator recovers at snapshots only (recover_at = "snapshot"), and this trainer pushes'
            " and writes none: give relight.trainer snapshots=SnapshotSync(…), or set recover_at to either"
        )

    def _marked(self, call: str, step: int, *, refused: UsageError | None = None) -> Version:
        """The version that the live parameters of every rank are from now on."""
        self._is_within(call)
        try:
            self._live.mark(step)
        except UsageError as error:
            refused = error
        self._crew.arrive(call, step, fit=True, error=refused)
        return Version(self.run, step)

    @contextmanager
    def _full(self, version: Version) -> Generator[Patience]:
        """An open boundary that exports `version` to everybody."""
        opened = Opened(version.step, version, version, "all", "train", self._settings.release)
        with self._crew.inside():
            self._gate.turn(opened)
            try:
                yield Patience(self._gate, self._link, self._settings, grace_s=self._alone.grace_s)
                self._crew.over()
            finally:
                self._gate.turn(Closed())

    def _next(self, patience: Patience) -> SyncWeights | End:
        while (come := patience.next(within_s=self._crew.beat_s)) is None:
            self._crew.beat()
        return come

    def _goes_on(self, end: End) -> bool:
        """Whether weights are to be handed over without the orchestrator. Raises OrchestratorLost."""
        if end is End.RELEASED:
            self._alone.synced()
            here = self._gate.barrier
            if here.released != "done":  # what engines lack then they get in a later boundary
                log.warning("sync was not done", extra={"boundary": here.boundary, "outcome": here.released})
            return False
        try:
            return self._alone.goes_on(end, absent_s=self._link.absent_s)
        except OrchestratorLost as lost:
            raise lost from self._link.failure

    def _last_members(self) -> Members:
        members = tuple(self._gate.barrier.roster.values())
        return Members(members, Left(members, self._gate.is_unlisted))


def _nobody() -> Members:
    return Members((), Left((), lambda _: False))
