"""The orchestrator: the real core behind memory, its state made canonical after each step."""

from typing import Any, Literal, NamedTuple

from relight.events import codec
from relight.events.decisions import RouteAdded, StartEngine, SyncWeights
from relight.events.facts import NodeUp
from relight.events.ids import BootId, EngineName, NodeName, RecoveryId, SyncId
from relight.events.schema import EngineState, Meta, NodeRecord, Recovery
from relight.events.values import Phase
from relight.events.version import BASE
from relight.orchestrator.core import step as core
from relight.orchestrator.core.job import Job, Step
from relight.orchestrator.core.timers import answer_due
from relight.orchestrator.settings import Settings
from tests.search import invariants
from tests.search.agent import concerns
from tests.search.pool import ARMED, NOW, Message, Messages, Pool, plain, replace

Timer = tuple[Literal["sync", "intent", "asked", "rest", "wait"], str]
REBORN = "born on an emptied bus"
NODES = {EngineName("e0"): NodeName("a"), EngineName("e1"): NodeName("b")}
ENGINES = {node: name for name, node in NODES.items()}


class State(NamedTuple):
    """What is committed, and how many syncs were ordered in the boundary that was named last."""

    job: Job
    minted: tuple[int, int, int] = (0, 0, 0)


class Outcome(NamedTuple):
    """What one step comes to."""

    state: int
    half: int
    """The state if the orchestrator dies before it commits the records of what has ended."""
    decisions: tuple[int, ...]
    to: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """What concerns the agents and the trainer."""
    broken: str | None
    starts: tuple[int, ...]
    """Indexes of the nodes on which something is started, and on which something is routed."""
    routes: tuple[int, ...]
    ended: bool = False
    """The term is over: an agent has obeyed a higher epoch."""


class Mind:
    """Steps of the core, each taken once."""

    def __init__(self, settings: Settings, messages: Messages, *, pushes: bool) -> None:
        self._settings = settings
        self._messages = messages
        self._pushes = pushes
        self._states: Pool[State] = Pool()
        self._known: dict[Any, Outcome] = {}
        self._timers: dict[int, tuple[Timer, ...]] = {}
        self.empty = self._born("born")
        self.reborn = self._born(REBORN)

    def _born(self, birth: str) -> int:
        return self.number(State(Job(0, self._settings, Meta(birth=birth, version=BASE, bus="0"), {})))

    def __getitem__(self, number: int) -> Job:
        return self._states[number].job

    def number(self, state: State) -> int:
        job = state.job
        parts = [codec.to_json(job.meta), *(codec.to_json(job.engines[name]) for name in sorted(job.engines))]
        return self._states.number(state, (job.epoch, state.minted, *parts))

    # --- steps -------------------------------------------------------------------------------------

    def hear(self, number: int, fact: int) -> Outcome:
        known = self._known.get((number, fact))
        if known is None:
            known = self._known[number, fact] = self._hear(number, fact)
        return known

    def _hear(self, number: int, fact: int) -> Outcome:
        job, told = self[number], self._messages[fact]
        if isinstance(told, NodeUp) and told.max_epoch > job.epoch:
            return Outcome(number, number, (), ((), (), ()), None, (), (), ended=True)
        return self._outcome(number, core.step(job, told, now=NOW), told)  # type: ignore[arg-type]

    def fire(self, number: int, timer: Timer) -> Outcome:
        """Let one deadline pass."""
        known = self._known.get((number, timer))
        if known is None:
            known = self._outcome(number, core.tick(_due(self[number], timer), now=NOW), timer)
            self._known[number, timer] = known
        return known

    def take_over(self, number: int, epoch: int, stamp: int) -> Outcome:
        key = (number, epoch, stamp)
        known = self._known.get(key)
        if known is None:
            done = core.take_over(self[number]._replace(epoch=epoch), now=NOW, bus=str(stamp))
            known = self._known[key] = self._outcome(number, done, "take over")
        return known

    def _outcome(self, number: int, done: Step, heard: Any) -> Outcome:
        before = self._states[number]
        broken = invariants.of_step(before.job, heard, done)
        after = core.committed(done.job, now=NOW)
        syncs, minted = _renamed(done, before.minted)
        said = [plain(decision, syncs) for decision in (*done.decisions, *after.decisions)]
        return Outcome(
            state=self.number(State(canonical(after.job, syncs), minted)),
            half=self.number(State(canonical(done.job, syncs), minted)),
            decisions=tuple(map(self._messages.of, said)),
            to=(self._to(said, "a"), self._to(said, "b"), self._to_trainer(said)),
            broken=broken,
            starts=_nodes([each for each in said if not _is_repeated(before.job, each)], StartEngine),
            routes=_nodes([each for each in said if _is_new(before.job, each)], RouteAdded),
        )

    def _to(self, said: list[Any], node: str) -> tuple[int, ...]:
        heads = (NODES.get(getattr(each, "engine", EngineName("")), NodeName("")) for each in said)
        return tuple(
            self._messages.of(each)
            for each, head in zip(said, heads, strict=True)
            if concerns(each, node, head=head)
        )

    def _to_trainer(self, said: list[Any]) -> tuple[int, ...]:
        return tuple(self._messages.of(each) for each in said if _concerns_trainer(each, self._pushes))

    # --- time --------------------------------------------------------------------------------------

    def timers(self, number: int) -> tuple[Timer, ...]:
        known = self._timers.get(number)
        if known is None:
            known = self._timers[number] = _armed(self[number])
        return known


def _nodes(said: list[Any], kind: type) -> tuple[int, ...]:
    done = [each for each in said if type(each).__name__ == kind.__name__ and not each.dry_run]
    nodes = [(NODES[each.engine], *getattr(each, "parts", ())) for each in done]
    return tuple("ab".index(node) for each in nodes for node in each)


def _is_repeated(before: Job, said: Message) -> bool:
    """A start that this epoch has asked for before."""
    if not isinstance(said, StartEngine):
        return False
    engine = before.engines.get(said.engine)
    return engine is not None and isinstance(engine.intent, StartEngine) and engine.intent.id == said.id


def _is_new(before: Job, said: Message) -> bool:
    """A route, and not the new version of one that stands."""
    return isinstance(said, RouteAdded) and before.engines[said.engine].route is None


def _concerns_trainer(message: Message, pushes: bool) -> bool:
    match type(message).__name__:
        case "SyncWeights" | "BoundaryReleased" | "TrainerSilent":
            return True
        case "ReportRequested":
            return message.run is not None  # type: ignore[union-attr]
        case "RouteFenced" | "StopEngine":
            return pushes  # they tell a push who has left
        case _:
            return False


def _renamed(done: Step, minted: tuple[int, int, int]) -> tuple[dict[SyncId, SyncId], tuple[int, int, int]]:
    """New sync ids, counted within their boundary."""
    syncs: dict[SyncId, SyncId] = {}
    for order in done.decisions:
        if isinstance(order, SyncWeights) and not order.sync.startswith("s"):
            count = minted[2] + 1 if minted[:2] == (order.run, order.boundary) else 1
            minted = (order.run, order.boundary, count)
            syncs[order.sync] = SyncId(f"s{order.run}.{order.boundary}.{count}")
    return syncs, minted


def canonical(job: Job, syncs: dict[SyncId, SyncId]) -> Job:
    """The job without what nothing may depend on."""
    meta = job.meta
    changes: dict[str, Any] = {"serial": 0, "counters": {}, "settings": {}}
    changes |= {"below_floor": 0, "floor_alarmed": False}  # who is alarmed decides nothing
    if meta.sync is not None:
        changes["sync"] = replace(meta.sync, order=plain(meta.sync.order, syncs))
    changes["nodes"] = {
        name: NodeRecord(
            boot=BootId(""),
            reported=record.reported,
            silent=record.silent,
            silent_since=NOW if record.silent else 0,
            missed_by=record.missed_by,  # or each word would bring the same Alarm again
            asked=plain(record.asked, syncs) if record.asked else None,
        )
        for name, record in sorted(meta.nodes.items())
    }
    engines = {name: _engine(job.engines[name], syncs) for name in sorted(job.engines)}
    return Job(job.epoch, job.settings, replace(meta, **changes), engines)


def _engine(engine: EngineState, syncs: dict[SyncId, SyncId]) -> EngineState:
    recovery = engine.recovery
    return replace(
        engine,
        intent=plain(engine.intent, syncs) if engine.intent else None,
        not_before=ARMED if engine.not_before > NOW and engine.phase in (Phase.BACKOFF, Phase.STALE) else 0,
        restarts=(NOW,) * len(engine.restarts),
        recovery=Recovery(
            id=RecoveryId("r"),
            incarnation=recovery.incarnation,
            why="",
            budgeted=recovery.budgeted,
            began=NOW,
        )
        if recovery
        else None,
        reference=None,
        start_s=None,
        retired_because="" if engine.retired_because else None,
        since=NOW,
        processes=(),
    )


def _armed(job: Job) -> tuple[Timer, ...]:
    """What time may do, the shortest wait first."""
    timers: list[Timer] = []
    nodes = job.meta.nodes
    timers += [("asked", name) for name, record in nodes.items() if record.asked and not record.silent]
    for name, engine in job.engines.items():
        if engine.phase in (Phase.BACKOFF, Phase.STALE) and engine.not_before > NOW:
            timers.append(("rest", name))
        if answer_due(job.meta, engine, epoch=job.epoch) is not None:
            timers.append(("intent", name))
        if engine.phase is Phase.STALE and not engine.alarmed and not job.meta.finished:
            timers.append(("wait", name))
    if job.meta.sync is not None:
        timers.append(("sync", ""))
    return tuple(timers)


def _due(job: Job, timer: Timer) -> Job:
    """The job with that one deadline reached."""
    kind, name = timer
    meta, engines = job.meta, dict(job.engines)
    if kind == "sync":
        assert meta.sync is not None
        meta = replace(meta, sync=replace(meta.sync, order=replace(meta.sync.order, deadline=NOW)))
    elif kind == "asked":
        record = meta.nodes[NodeName(name)]
        assert record.asked is not None
        due = replace(record, asked=replace(record.asked, deadline=NOW))
        meta = replace(meta, nodes={**meta.nodes, NodeName(name): due})
    else:
        engine = engines[EngineName(name)]
        if kind == "rest":
            engine = replace(engine, not_before=NOW)
        elif kind == "wait":
            engine = replace(engine, since=NOW - int(job.settings.waiting_s * 1000))
        else:
            assert engine.intent is not None
            engine = replace(engine, intent=replace(engine.intent, deadline=NOW))
        engines[EngineName(name)] = engine
    return job._replace(meta=meta, engines=engines)
