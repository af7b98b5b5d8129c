"""One run of a trainer: its boundaries and syncs, on a bus.

Weights are touched in the application's thread (or a boundary's export thread) only, and only while a
boundary is open. Whatever happens to the bus or the orchestrator, a call here ends: with the weights
synced, with them knowingly not synced, or with an error that says so.
"""

import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self, TypeVar, overload

from relight.agents.snapshot import directory_of
from relight.agents.trainer.alone import Alone
from relight.agents.trainer.barrier import Closed, Ended, Moved, Opened, Phase
from relight.agents.trainer.boundary import Boundary
from relight.agents.trainer.export import Exporter
from relight.agents.trainer.gate import Gate
from relight.agents.trainer.lanes import Lane
from relight.agents.trainer.link import Link
from relight.agents.trainer.live import Live
from relight.agents.trainer.members import Members
from relight.agents.trainer.patience import End, OrchestratorLost, Patience
from relight.agents.trainer.settings import Settings
from relight.agents.trainer.snapshot import adopt
from relight.agents.trainer.sync import Left, WeightSync, refusal, said
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

    def __init__(self, url: str, *, job: str, sync: WeightSync | None, settings: Settings) -> None:
        self._sync = sync
        self._settings = settings
        self._gate = Gate(sync, say=self._say)
        self._link = Link(url, job_name(job), listener=self._gate)
        self._exporter = Exporter(self._gate, sync) if sync is not None else None
        self._alone = Alone(settings, pushes=sync is None or sync.pushes)
        self._lane = Lane()
        self._live = Live(0, sync)
        self._announced: Version | None = None

    def _say(self, fact: Fact) -> None:
        self._link.say(fact)

    def __enter__(self) -> Self:
        run = self._link.start(within_s=self._settings.connect_s)
        self._live = Live(run, self._sync)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clean = kind is None
        if clean:
            self._say(JobFinished(run=self.run))
        flush_s = self._settings.flush_s if clean else FLUSH_AFTER_ERROR_S
        if not self._link.stop(flush_s=flush_s, clean=clean):
            log.warning("trainer ends with facts unsent", extra={"run": self.run, "clean": clean})
        self._lane.close()
        if self._sync is not None:
            self._sync.close()

    @property
    def run(self) -> int:
        return self._gate.barrier.run

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
        self._gate.turn(self._stale(step, phase))
        try:
            work = self._lane.start(fn)
            work.future.add_done_callback(lambda _: self._gate.poke())
            try:
                while (order := self._gate.next_order(until=work.future.done)) is not None:
                    self._export(order)
            except BaseException:
                work.cancel()
                raise
            return work.result()
        finally:
            self._gate.turn(Closed())

    def boundary(self, step: int, *, phase: Phase = "rollout") -> Boundary:
        return Boundary(self._gate, opening=lambda: self._stale(step, phase), export=self._export)

    def _export(self, order: SyncWeights) -> Exception | None:
        assert self._exporter is not None, "nothing is exportable without a transport"
        return self._exporter.run(order)

    def _stale(self, step: int | None, phase: Phase) -> Opened:
        exports = self._live.exports(step)
        known = [version for version in (self._live.version, self._announced) if version is not None]
        version = max(known, default=Version(self.run, step or 0))
        return Opened(version.step if step is None else step, version, exports, "stale", phase)

    def swapped(self) -> AbstractContextManager[None]:
        self._live.swapped = True
        self._move()
        return self._back()

    @contextmanager
    def _back(self) -> Generator[None]:
        """An exception leaves them swapped: nobody can say what the model holds."""
        yield
        self._live.swapped = False
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
        sync, exporter = self._sync, self._exporter
        if sync is None or exporter is None:
            raise UsageError("trainer.sync needs a transport: give relight.trainer a sync=")
        version = self._live.mark(step)
        exported, failures = False, 0
        with self._full(version) as patience:
            while isinstance(order := patience.next(), SyncWeights):
                error = exporter.run(order)
                exported = exported or error is None
                failures += error is not None
                # What a failed push touched is restarted and asked for again, once; a write just fails.
                if error is not None and (not sync.pushes or failures > 1):
                    raise error
            if self._goes_on(order) and not exported and (published := exporter.alone(version)):
                self._say(published)

    @contextmanager
    def syncing(self, step: int) -> Generator[Members]:
        with self._full(self._live.mark(step)) as patience:
            order = patience.next()
            if not isinstance(order, SyncWeights):
                yield self._last_members() if self._goes_on(order) else _nobody()
                return
            members = Members(order.members, Left(order.members, self._gate.is_gone))
            try:
                yield members
            except BaseException as error:
                self._gate.turn(Ended(refusal(order, said(error), touched=True)))
                raise
            self._gate.turn(Ended(members.answer(order)))
            while isinstance(late := patience.next(), SyncWeights):
                self._gate.turn(Ended(refusal(late, f"{late.version} was synced by the application already")))
            self._alone.synced()

    def published(self, step: int, uri: str) -> None:
        version = Version(self.run, step)
        digest = adopt(directory_of(uri), version)
        self._announced = max(version, self._announced or version)
        self._say(WeightsPublished(version=version, uri=uri, digest=digest))

    @contextmanager
    def _full(self, version: Version) -> Generator[Patience]:
        """An open boundary that exports `version` to everybody."""
        opened = Opened(version.step, version, version, "all", "train", self._settings.release)
        self._gate.turn(opened)
        try:
            yield Patience(self._gate, self._link, self._settings, grace_s=self._alone.grace_s)
        finally:
            self._gate.turn(Closed())

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
