"""An orchestrator that follows a script: for the tests of what stands on the other side of the bus."""

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.job import Commit, JobBus, Lease
from relight.events.decisions import BoundaryReleased, Decision, SyncWeights
from relight.events.facts import Fact, SafeBoundary, WeightsPublished, WeightsSynced
from relight.events.ids import BEGINNING, DecisionId, JobName, Source, SyncId
from relight.events.schema import Meta
from relight.events.values import Member

F = TypeVar("F", bound=Fact)
Answer = Callable[["Script", Fact], Iterable[Decision]]


def obedient(script: "Script", fact: Fact) -> Iterable[Decision]:
    """Order each full sync, and let the trainer go when it is answered."""
    if isinstance(fact, SafeBoundary) and fact.state == "open" and fact.sync == "all":
        yield script.order(fact)
    if isinstance(fact, WeightsPublished | WeightsSynced) and fact.sync is not None:
        yield script.release()


def deaf(script: "Script", fact: Fact) -> Iterable[Decision]:
    """Hold the lease and say nothing."""
    return ()


class Script:
    """Holds the job's lease, and commits what `answer` says to each fact that comes from now on.

    `facts` is complete once the scope has ended.
    """

    def __init__(
        self,
        url: str,
        answer: Answer = obedient,
        *,
        job: str = "j",
        members: Iterable[Member] = (),
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.members = tuple(members)
        self.facts: list[Fact] = []
        self.here: SafeBoundary | None = None
        self.url = url
        self._answer = answer
        self._settings = dict(settings or {})
        self._job = JobName(job)
        self._serial = 0
        self._number = 0
        self._epoch = 0
        self._come = threading.Condition()

    def __enter__(self) -> Self:
        self._portal_scope = start_blocking_portal()
        self._portal: BlockingPortal = self._portal_scope.__enter__()
        ready: threading.Event = threading.Event()
        self._stop = self._portal.call(anyio.Event)
        self._running = self._portal.start_task_soon(self._run, ready)
        assert ready.wait(10), self._running.exception(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._stop.set)
        self._running.result(10)
        self._portal_scope.__exit__(None, None, None)

    # --- from the test -----------------------------------------------------------------------------

    def decide(self, *decisions: Decision) -> None:
        self._portal.call(self._commit, decisions)

    def until(self, kind: type[F], fits: Callable[[F], bool] = lambda _: True) -> F:
        """Wait for a fact; whatever came before counts too."""

        def found() -> F | None:
            return next((fact for fact in self.facts if isinstance(fact, kind) and fits(fact)), None)

        with self._come:
            fact = self._come.wait_for(found, 10)
        assert fact is not None, f"no such {kind.__name__} among {self.facts}"
        return fact

    def all(self, kind: type[F]) -> list[F]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def order(self, here: SafeBoundary, *, members: Iterable[Member] | None = None) -> SyncWeights:
        decision_id = self.next_id()
        assert here.exports is not None
        return SyncWeights(
            id=decision_id,
            epoch=self._epoch,
            reason="script",
            sync=SyncId(f"s{decision_id}"),
            run=here.run,
            boundary=here.boundary,
            version=here.exports,
            members=self.members if members is None else tuple(members),
            deadline=0,
        )

    def release(self, *, dry_run: bool = False) -> BoundaryReleased:
        assert self.here is not None
        return BoundaryReleased(
            id=self.next_id(),
            epoch=self._epoch,
            reason="script",
            run=self.here.run,
            boundary=self.here.boundary,
            outcome="done",
            dry_run=dry_run,
        )

    def next_id(self) -> DecisionId:
        self._serial += 1
        return DecisionId(f"{self._epoch}-{self._serial}")

    @property
    def epoch(self) -> int:
        return self._epoch

    # --- in its loop -------------------------------------------------------------------------------

    async def _run(self, ready: threading.Event) -> None:
        async with open_bus(self.url) as bus:
            job = bus.job(self._job)
            lease = await job.take_lease("script", ttl_ms=60_000)
            assert lease is not None
            self._bus: JobBus = job
            self._lease: Lease = lease
            self._epoch = lease.epoch
            before = await job.snapshot()
            self._number = before.commit
            self._birth = before.birth or uuid.uuid4().hex
            await self._commit(())
            heard = await job.tail(job.keys.facts, count=1)
            self._cursor = heard[0].entry_id if heard else BEGINNING
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, job)
                ready.set()
                await self._stop.wait()
                tasks.cancel_scope.cancel()
            for entry in await job.read_facts(self._cursor):
                self.facts.append(codec.decode_fact(entry))
            await job.release_lease(lease)

    async def _read(self, job: JobBus) -> None:
        reader = job.bus.reader()
        while True:
            for entry in await job.read_facts(self._cursor, reader=reader, block_ms=1000):
                fact = codec.decode_fact(entry)
                if isinstance(fact, SafeBoundary):
                    self.here = fact
                decisions = tuple(self._answer(self, fact))
                if decisions:
                    await self._commit(decisions)
                with self._come:
                    self._cursor = entry.entry_id
                    self.facts.append(fact)
                    self._come.notify_all()

    async def _commit(self, decisions: Iterable[Decision]) -> None:
        self._number += 1
        run = self.here.run if self.here else 0
        commit = Commit(
            number=self._number,
            cursor=BEGINNING,
            state={"meta": codec.to_json(Meta(birth=self._birth, run=run, settings=self._settings))},
            decisions=tuple(decisions),
        )
        await self._bus.commit(commit, lease=self._lease, source=Source("orchestrator/script"))
