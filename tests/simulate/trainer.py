"""The trainer of a job: the real barrier, gate, patience and rules, around a small program of steps.

`agents.trainer.run.Run` and `link.Link` block threads; their turns are mirrored here as coroutines, one where
the application's thread would be and one for each task of the bus thread. A run ends when its process does;
then whoever runs the job starts another one from its last checkpoint.
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from relight.agents.outbox import MemoryOutbox, Publisher
from relight.agents.trainer.alone import Alone
from relight.agents.trainer.barrier import Closed, Ended, Opened
from relight.agents.trainer.gate import Gate
from relight.agents.trainer.link import _highest_run
from relight.agents.trainer.live import Live
from relight.agents.trainer.members import Members
from relight.agents.trainer.patience import End, OrchestratorLost, Patience, Superseded
from relight.agents.trainer.settings import Settings
from relight.agents.trainer.sync import Left, refusal
from relight.events.bus.client import Bus
from relight.events.bus.follow import RETRY_S, Decided, Follower, Synced
from relight.events.bus.job import JobBus
from relight.events.decisions import SyncWeights
from relight.events.errors import BusUnavailable
from relight.events.facts import JobFinished, WeightsPublished
from relight.events.ids import BootId, SyncId, trainer_source
from relight.events.values import Member
from relight.events.version import Version
from tests.simulate.flow import Condition, Event, Scope
from tests.simulate.followed import Followed
from tests.simulate.kernel import Process
from tests.simulate.link import Link, Pulse

if TYPE_CHECKING:
    from tests.simulate.world import Job

Rollout = Callable[[], Coroutine[Any, Any, None]]

TRANSPORT_S = 20.0
"""A push waits this long for an engine that does not answer."""


FLUSH_S = 1.0
"""What a run that ends by an error gives its last facts."""


class ExportFailed(Exception):
    """What a transport raises."""


class Interrupted(Exception):
    """What Ctrl-C raises in the application."""


ENDS = (OrchestratorLost, Superseded, ExportFailed, Interrupted, BusUnavailable)
"""What may end a run from within."""


class _Transport:
    """The part of a WeightSync that `Live` asks: what changes when the live parameters do."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self.pushes = trainer.job.plan.pushes
        self.subset = trainer.job.plan.subset

    def exportable(self, version: Version) -> bool:
        return True

    def fingerprint(self) -> int:
        return self._trainer.steps_made


class Trainer:
    """Every run of one job's trainer."""

    def __init__(self, job: "Job") -> None:
        self.job = job
        self.checkpoint = 0
        self.steps_made = 0
        """Optimizer steps of the live parameters: they change with each."""
        self.iterations = 0
        """Steps whose rollouts came back, over all runs."""
        self.transport = _Transport(self)
        self.source = ""
        self.last_words: tuple[list[str], list[str]] | None = None
        """What this run said last: keys and arguments of the script."""
        self.ghost: tuple[list[str], list[str]] | None = None
        """The same of an earlier run."""
        self.process: Process | None = None
        self.link: Link | None = None
        self.gate: Gate | None = None
        self.pulse: Pulse | None = None
        self.exporting = False
        self.written: set[Version] = set()
        """Versions that stand, to be pulled."""
        self.over = False
        """The training came to its clean end."""
        self._cut_off: Event | None = None

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.alive

    def start(self) -> None:
        world = self.job.world
        process = self.process = world.process(f"trainer-{self.job.name}")
        process.failed = self._failed
        self.link = world.link(process)
        self.gate, self.pulse, self.exporting, self.over = None, None, False, False
        process.spawn(self._main(process, self.link))

    def crash(self) -> None:
        """End it as SIGKILL does. What a push has written so far nobody can say."""
        if self.process is None:
            return
        self.process.kill()
        if self.pulse is not None:
            self.pulse.settle()
        if self.exporting and self.gate is not None and self.gate.barrier.running is not None:
            self._write(self.gate.barrier.running, None, cut_off=True)
        self.exporting = False
        self.process = None
        self.ghost, self.last_words = self.last_words or self.ghost, None
        self.job.trainer_ended()

    def cut_off(self) -> bool:
        """Interrupt the running export, as Ctrl-C does; whether there was one."""
        if not self.exporting or self._cut_off is None:
            return False
        self._cut_off.set()
        return True

    def announces_again(self) -> bool:
        """Announce the oldest weights of this run that stand, as applications may; whether there are any."""
        run = self.gate.barrier.run if self.gate is not None else 0
        older = sorted(version for version in self.written if version.run == run)[:-1]
        if not self.up or not older:
            return False
        self.publisher.say(_published(older[0], None))
        return True

    def _failed(self, error: BaseException) -> None:
        """The application ends by an error."""
        if not isinstance(error, ENDS):
            self.job.world.broke(error)
        self.job.note("trainer", f"ends: {type(error).__name__}: {error}")
        self.crash()

    # --- the bus thread ----------------------------------------------------------------------------

    async def _main(self, process: Process, link: Link) -> None:
        """`Link._main`: a run number, the state, then everything at once."""
        bus = Bus("redis://bus", link.connect)
        job = bus.job(self.job.name)
        gate = self.gate = Gate(self.transport, say=self._say)  # type: ignore[arg-type]
        run = await self._begin(job)
        self.job.judge.began(run)
        gate.begin(run)
        follower = Followed(job, self.job.judge)
        while not isinstance(event := await follower.next(), Synced):
            pass
        gate.hear(event)
        source = self.source = trainer_source(run)
        self._session = _Session(self, run, link, job)
        self.publisher = Publisher(
            job, MemoryOutbox(collapse=gate.stands), source=source, boot=BootId(str(run))
        )
        self.pulse = link.pulse(job.keys.pulse, source, str(run), 0)
        process.spawn(self.publisher.run(install=False))
        process.spawn(self._follow(follower, gate, self._session))
        try:
            await self._program(self._session)
        except ENDS:
            with Scope(self.job.kernel, delay=FLUSH_S):
                await self.publisher.flushed()
            raise

    async def _begin(self, job: JobBus) -> int:
        while True:
            try:
                await job.bus.check()
                await job.bus.enrol(job.name)
                return await job.issue_run(floor=_highest_run(await job.snapshot()))
            except BusUnavailable:
                await self.job.world.flow.sleep(RETRY_S[-1])

    async def _follow(self, follower: Follower, gate: Gate, session: "_Session") -> None:
        while True:
            event = await follower.next()
            if isinstance(event, Decided):
                session.heard_at = self.job.world.flow.monotonic()
            gate.hear(event)

    def _say(self, fact: Any) -> None:
        self.publisher.say(fact)

    # --- the application ---------------------------------------------------------------------------

    async def _program(self, session: "_Session") -> None:
        """What a training script does."""
        plan, random = self.job.plan, self.job.random
        step = self.checkpoint
        await session.sync(step)
        while True:
            await session.wait(self._rollout)
            self.iterations += 1
            if self.job.finishes(self):
                break
            await self.job.world.flow.sleep(random.uniform(0.5, 1.5) * plan.train_s)
            self.steps_made += 1
            step += 1
            if random.random() < plan.evaluates:
                await session.wait(self._evaluation, phase="eval")
            await session.sync(step)
            self.checkpoint = step
        self.over = True
        self.publisher.say(JobFinished(run=session.run))
        with Scope(self.job.kernel, delay=5.0):
            await self.publisher.flushed()
        self.crash()

    async def _rollout(self) -> None:
        """Rollouts come back when so many turns have ended since."""
        until = self.job.turns + self.job.plan.turns
        while self.job.turns < until:
            await self.job.turned.wait()

    async def _evaluation(self) -> None:
        await self.job.world.flow.sleep(self.job.random.uniform(1.0, 5.0))

    # --- exports -----------------------------------------------------------------------------------

    async def export(self, order: SyncWeights, left: Left) -> Any:
        """`WeightSync.export`: takes its time, and may fail or be cut off. Raises what a transport does."""
        job = self.job
        job.judge.exports(self, order)
        self.exporting, self._cut_off = True, Event(job.kernel)
        seconds = job.random.uniform(0.5, 1.5) * job.plan.export_s
        if order.version in self.written:
            seconds = 0.01
        if job.plan.pushes:
            self._write(order, None)
            if any(self._is_stuck(member) for member in order.members):
                seconds = TRANSPORT_S
        with Scope(job.kernel, delay=seconds) as scope:
            await self._cut_off.wait()
        self.exporting = False
        if not scope.cancelled_caught:
            if job.plan.pushes:
                self._write(order, None, cut_off=True)
            raise Interrupted
        job.judge.exports(self, order)
        if job.fails("export-fails"):
            raise ExportFailed("disk full")
        if not job.plan.pushes:
            self.written.add(order.version)
            return WeightsPublished(
                sync=order.sync,
                version=order.version,
                uri=f"/w/{order.version}",
                digest=f"sha256:{order.version}",
            )
        members = Members(order.members, left)
        reached = [m for m in order.members if self._is_there(m) and m.engine not in left]
        for member in order.members:
            if member not in reached and member.engine not in left:
                members.fail(member.engine, "it does not answer")
        self._write(order, order.version, only=reached)
        return members.answer(order)

    def _is_there(self, member: Member) -> bool:
        engine = self.job.engine(member.engine)
        here = engine.process(member.incarnation)
        reached = here is not None and here.alive and not engine.machine.cut
        return reached and engine.hung != member.incarnation

    def _is_stuck(self, member: Member) -> bool:
        engine = self.job.engine(member.engine)
        return engine.machine.cut or engine.hung == member.incarnation

    def _write(
        self,
        order: SyncWeights,
        version: Version | None,
        *,
        cut_off: bool = False,
        only: list[Member] | None = None,
    ) -> None:
        """What a push does to its members; `version` none: nobody can say what they hold."""
        if not self.job.plan.pushes:
            return
        for member in order.members if only is None else only:
            engine = self.job.engine(member.engine)
            if not engine.machine.cut:
                if cut_off:
                    engine.cut_off_on[member.incarnation] = self.job.judge.generation(order)
                if version is not None and engine.paused == member.incarnation:
                    engine.paused = 0  # the transport resumes its members
                engine.put(engine.lives.pushed(engine.agent, member.incarnation, version, cut_off=cut_off))


def _published(version: Version, sync: SyncId | None) -> WeightsPublished:
    return WeightsPublished(sync=sync, version=version, uri=f"/w/{version}", digest=f"sha256:{version}")


class _Session:
    """`Run`'s turns, and what `Patience` asks of a link."""

    def __init__(self, trainer: Trainer, run: int, link: Link, job: JobBus) -> None:
        assert trainer.gate is not None
        transport, plan = trainer.transport, trainer.job.plan
        self.run = run
        self.failure: Exception | None = None
        self.heard_at = trainer.job.world.flow.monotonic()
        self._trainer = trainer
        self._gate = trainer.gate
        self._link = link
        self._job = job
        self._settings = Settings(orchestrator_grace_s=plan.grace_s, orphan_deadline_s=plan.orphan_s)
        self._alone = Alone(self._settings, pushes=transport.pushes)
        self._live = Live(run, transport)  # type: ignore[arg-type]
        self._pushes = transport.pushes

    @property
    def changed(self) -> Condition:
        changed: Any = self._gate.changed
        assert isinstance(changed, Condition)
        return changed

    # --- what Patience asks ------------------------------------------------------------------------

    @property
    def seen_at(self) -> float:
        """`Link.seen_at`: looked at with each pulse, and so no later than the last one."""
        beat = self._trainer.pulse.last_s() if self._trainer.pulse is not None else None
        if beat is not None and self._link.network.server.expires_in_s(self._job.keys.lease) is not None:
            skew_s = self._trainer.job.world.flow.monotonic() - self._trainer.job.kernel.now
            self.heard_at = max(self.heard_at, beat + skew_s)
        return self.heard_at

    def seconds_until(self, deadline_ms: int) -> float:
        return self._job.bus.clock.seconds_until(deadline_ms)

    # --- Run's turns -------------------------------------------------------------------------------

    async def wait(self, rollout: Rollout, *, phase: Any = "rollout") -> None:
        """`Run.wait`: the rollout runs, and exports that are asked for run beside it."""
        gate, step = self._gate, None
        exports = self._live.exports(step)
        version = self._live.version or Version(self.run, 0)
        gate.turn(Opened(version.step, version, exports, "stale", phase))
        done = Event(self._trainer.job.kernel)
        process = self._trainer.process
        assert process is not None
        process.spawn(_until(rollout, done, gate))
        try:
            while (order := await self.changed.again(lambda: gate.next_order(until=done.is_set))) is not None:
                await self._export(order)
        finally:
            self._close()

    async def sync(self, step: int) -> None:
        """`Run.sync`."""
        gate, trainer = self._gate, self._trainer
        version = self._live.mark(step)
        exported, failures = False, 0
        gate.turn(Opened(version.step, version, version, "all", "train", trainer.job.plan.release))
        try:
            patience = Patience(gate, self, self._settings, grace_s=self._alone.grace_s)  # type: ignore[arg-type]
            while isinstance(order := await self.changed.again(patience.next), SyncWeights):
                error = await self._export(order)
                exported = exported or error is None
                failures += error is not None
                if error is not None and (not self._pushes or failures > 1):
                    raise error
            if self._goes_on(order) and not exported:
                await self._export_alone(version)
        finally:
            self._close()

    def _close(self) -> None:
        if self._trainer.up:  # nothing of a killed process is said
            self._gate.turn(Closed())

    async def _export(self, order: SyncWeights) -> Exception | None:
        """`Exporter.run`."""
        gate = self._gate
        try:
            answer = await self._trainer.export(order, Left(order.members, gate.is_gone))
        except ExportFailed as error:
            gate.turn(Ended(refusal(order, str(error), touched=self._pushes)))
            return error
        gate.turn(Ended(answer))
        return None

    async def _export_alone(self, version: Version) -> None:
        """`Exporter.alone`: to the members last committed."""
        barrier = self._gate.barrier
        members = tuple(barrier.roster.values())
        self._trainer.job.count("alone")
        if not self._pushes:
            await self._trainer.job.world.flow.sleep(self._trainer.job.plan.export_s)
            self._trainer.written.add(version)
            self._trainer.publisher.say(_published(version, None))
            return
        self._trainer.job.judge.alone(members, version)
        for member in members:
            engine = self._trainer.job.engine(member.engine)
            engine.put(engine.lives.pushed(engine.agent, member.incarnation, version))

    def _goes_on(self, end: Any) -> bool:
        """`Run._goes_on`."""
        if end is End.RELEASED:
            self._alone.synced()
            return False
        return self._alone.goes_on(end, absent_s=self._trainer.job.world.flow.monotonic() - self.seen_at)


async def _until(rollout: Rollout, done: Event, gate: Gate) -> None:
    await rollout()
    done.set()
    gate.poke()
