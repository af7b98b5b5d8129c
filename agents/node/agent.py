"""The node agent: one process that owns a job's engines on one machine.

It follows decisions, says facts, and supervises on whether the bus is there or not. Invariants: one agent at
a time holds the state directory; the highest epoch is on disk before a decision of it is obeyed, and lower
ones are answered with NodeUp; engines outlive the agent unless it is told to stop them.
"""

import logging
import socket
import time
from collections.abc import Awaitable, Callable

import aiohttp
import anyio

from relight.agents.adapters import nvml, vllm
from relight.agents.node import launch, lifecycle, parts, pidfd
from relight.agents.node.config import NodeFile
from relight.agents.node.delegated.desk import Desk
from relight.agents.node.delegated.launcher import ByApplication
from relight.agents.node.devices import Devices, Memory
from relight.agents.node.holdings import Holdings
from relight.agents.node.hurry import Hurry
from relight.agents.node.owned import Shared
from relight.agents.node.record import Store
from relight.agents.node.tenants import Tenants
from relight.agents.outbox import FileOutbox, Publisher
from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.follow import Away, Decided, Follower, Noted, Synced
from relight.events.bus.job import JobBus, Pulse
from relight.events.decisions import (
    AnyDecision,
    LoadWeights,
    ProbeEngine,
    ReportRequested,
    RouteAdded,
    StartEngine,
    StopEngine,
    SyncWeights,
    VerifyEngine,
)
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, Fenced, RelightError, Undecodable, leaves
from relight.events.facts import EngineStopped, Fact, NodeSilent, NodeUp, StartFailed
from relight.events.ids import DecisionId, NodeName, agent_source
from relight.events.schema import Snapshot

log = logging.getLogger(__name__)

PULSE_S = 1.0
FLUSH_S = 2.0
"""For the last facts of an agent that is told to end."""


async def serve(  # noqa: PLR0913 -- each is one choice of whoever runs it
    node_file: NodeFile,
    *,
    bus_url: str,
    stop_engines: bool = False,
    hurry: Hurry | None = None,
    devices: Devices | None = None,
    until: Callable[[], Awaitable[None]] = anyio.sleep_forever,
) -> None:
    """Run the agent until it is cancelled or `until` returns, which is begun once it is up.

    Engines live on, or are stopped if `stop_engines`. `hurry` matters once it is cancelled. `devices`: who
    knows this machine's; none for NVML, where there is one.

    Raises UsageError (state directory held or unusable), BusUnavailable (a first start, and the bus was
    never reached), Fenced (another agent speaks as this node).
    """
    store = Store(node_file.state_path)
    try:
        tenants = Tenants(node_file, store)
        first = not any(store.record(engine.name) for engine in tenants.places.here)
        launch.raise_file_limit()
        pidfd.become_subreaper()
        async with open_bus(bus_url, reached=first) as bus, vllm.session() as http:
            agent = Agent(tenants, store=store, bus=bus, http=http, devices=devices or nvml.found())
            log.info(
                "agent is up job=%s node=%s state_dir=%s", node_file.job, node_file.node, store.directory
            )
            try:
                await agent.run(until)
            finally:
                with anyio.CancelScope(shield=True):
                    if hurry is not None:
                        hurry.when_set(agent.hurry)
                    await agent.end(stop_engines=stop_engines)
    finally:
        store.close()


class Agent:
    """What `serve` runs."""

    def __init__(
        self,
        tenants: Tenants,
        *,
        store: Store,
        bus: Bus,
        http: aiohttp.ClientSession,
        devices: Devices | None,
    ) -> None:
        file = tenants.file
        self._node = file.node
        self._host = file.host or socket.gethostname()
        self._store = store
        self._bus = bus
        self._job: JobBus = bus.job(file.job)
        self._source = agent_source(file.node)
        self._follows = False
        self._outbox = FileOutbox(store.directory, collapse=self._node_up, source=self._source)
        self._publisher = Publisher(self._job, self._outbox, source=self._source, boot=store.boot)
        self._tenants = tenants
        self._slots = tenants.slots
        holdings = Holdings(self._slots, store)
        slots = tenants.places.delegated
        self._desk = Desk(store.directory, job=file.job, node=file.node, slots=slots) if slots else None
        shared = Shared(
            job=file.job,
            node=file.node,
            host=self._host,
            store=store,
            http=http,
            clock=bus.clock,
            say=self._say,
            follows=lambda: self._follows,
            ports=holdings.ports,
            memory=Memory(devices, kin=holdings.pids),
            delegated=ByApplication(self._desk, owner_of=holdings.owner_of) if self._desk else None,
        )
        tenants.furnish(shared)

    async def run(self, until: Callable[[], Awaitable[None]]) -> None:
        """Work until cancelled, or until `until` returns."""
        self._tenants.adopt()
        try:
            async with anyio.create_task_group() as tasks:
                self._tenants.run(tasks)
                tasks.start_soon(self._tell_room)
                tasks.start_soon(self._publish)
                tasks.start_soon(self._pulse)
                if self._desk is not None:
                    tasks.start_soon(self._desk.run)
                tasks.start_soon(self._follow)
                await until()
                tasks.cancel_scope.cancel()
        except* RelightError as group:
            raise leaves(group)[0] from None

    def hurry(self) -> None:
        """Give no engine that is being stopped any more time."""
        for slot in self._slots.values():
            slot.owned.hurry()

    async def end(self, *, stop_engines: bool) -> None:
        """Let go of the engines, or stop them, and say the last facts."""
        try:
            if stop_engines:
                await self._stop_all()
            with anyio.move_on_after(FLUSH_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._publish)
                    await self._publisher.flushed()
                    if stop_engines:
                        await self._still()
                    tasks.cancel_scope.cancel()
        except* Fenced:
            log.warning("another agent speaks as this node; the last facts stay unsaid")
        finally:
            self._tenants.close()
            if self._desk is not None:
                self._desk.close()
            self._outbox.close()

    async def _stop_all(self) -> None:
        async with anyio.create_task_group() as tasks:
            for slot in self._slots.values():
                if slot.owned.record.phase != "absent":
                    tasks.start_soon(lifecycle.end_present, slot.owned)
        self._publisher.say(self._node_up())

    async def _still(self) -> None:
        try:
            await self._job.still(self._source)
        except BusUnavailable as error:
            log.info("the bus is away, so the last pulse stays error=%s", error)

    def _say(self, fact: Fact) -> None:
        """Publish what an engine's slot says; one that has ended may have made room."""
        self._publisher.say(fact)
        if isinstance(fact, EngineStopped | StartFailed):
            self._tenants.changed()

    async def _tell_room(self) -> None:
        while True:
            await self._tenants.room_changed()
            self._publisher.say(self._node_up())

    async def _publish(self) -> None:
        await self._publisher.run(install=True)

    async def _pulse(self) -> None:
        seq = time.time_ns() // 1_000_000  # above that of every earlier life of this boot
        while True:
            seq += 1
            self._store.beat()
            try:
                await self._job.pulse(self._source, Pulse(self._store.boot, seq))
            except BusUnavailable:
                log.debug("no pulse: the bus is away")
            await anyio.sleep(PULSE_S)

    # --- decisions ---------------------------------------------------------------------------------

    async def _follow(self) -> None:
        follower = Follower(self._job)
        while True:
            match await follower.next():
                case Synced(snapshot=snapshot, why=why):
                    await self._synced(snapshot, why)
                    self._follows = True
                case Decided(decision=decision):
                    self._decided(decision)
                case Noted(entry=entry):
                    self._noted(entry)
                case Away(reason=reason):
                    self._follows = False
                    log.warning("the bus is away; engines serve on reason=%s", reason)
                case _:
                    pass

    async def _synced(self, snapshot: Snapshot, why: str) -> None:
        log.info("synced why=%s epoch=%d", why, snapshot.epoch)
        self._store.raise_epoch(snapshot.epoch)  # what is said from here on is said under that epoch
        self._tenants.heard(snapshot.engines)
        if why != "gap":
            for name, state in snapshot.engines.items():
                slot = self._tenants.place_lost(name, state) if self._node in state.nodes else None
                if slot is not None:
                    await slot.recall(state)
            await self._enrol()
        if why != "gap" or is_called_silent(snapshot, self._node):
            self._publisher.say(self._node_up())
        self._lend_again(snapshot)
        for state in snapshot.engines.values():
            for order in (state.intent, *(left.intent for left in state.left)):
                if order is not None and order.epoch >= snapshot.epoch:
                    self._decided(order)  # one of an older epoch is asked for again, not obeyed

    def _lend_again(self, snapshot: Snapshot) -> None:
        """Those that the open sync still waits for may be in the middle of a push, whose order has gone by.

        Of whatever epoch: a sync stays open when another orchestrator takes over.
        """
        sync = snapshot.meta.sync if snapshot.meta is not None else None
        if sync is None:
            return
        self._store.raise_run(sync.order.run)
        for name in sync.pending:
            pulls = isinstance(snapshot.engines[name].intent, LoadWeights | VerifyEngine)
            if name in self._slots and not pulls:
                self._slots[name].lease(sync.order)

    def _noted(self, entry: Entry) -> None:
        """Not silent at all, only cut off or stopped for a while: what is true is said again."""
        try:
            fact = codec.decode_fact(entry)
        except Undecodable as error:
            log.warning("a decision of no known type is passed over error=%s", error)
            return
        if isinstance(fact, NodeSilent) and fact.node == self._node:
            self._publisher.say(self._node_up())

    async def _enrol(self) -> None:
        try:
            await self._bus.enrol(self._job.name)
        except BusUnavailable:
            log.info("not enrolled: the bus is away; the orchestrator repeats it")

    def _decided(self, decision: AnyDecision) -> None:
        if decision.dry_run and not isinstance(decision, ReportRequested):  # a report changes nothing
            return
        if decision.epoch < self._store.known.max_epoch:
            log.warning("an older epoch is not obeyed id=%s type=%s", decision.id, type(decision).__name__)
            self._publisher.say(self._node_up())
            return
        self._store.raise_epoch(decision.epoch)
        self._end_lease(decision)
        match decision:
            case StartEngine() | StopEngine():
                if self._node in parts.addressed(decision):
                    self._tenants.slot_for(decision).obey(decision)
                elif isinstance(decision, StartEngine):
                    self._tenants.started(decision.engine, decision.node)
            case ProbeEngine() | LoadWeights() | VerifyEngine():
                if decision.engine in self._slots:
                    self._slots[decision.engine].obey(decision)
            case ReportRequested(node=node) if node == self._node:
                self._publisher.say(self._node_up(decision.id))
            case SyncWeights():
                self._store.raise_run(decision.run)
                for member in decision.members:
                    if member.engine in self._slots:
                        self._slots[member.engine].lease(decision)
            case _:
                pass

    def _end_lease(self, decision: AnyDecision) -> None:
        """A sync is over for an engine that is routed, and pushes nothing into one that is to pull."""
        if isinstance(decision, LoadWeights | VerifyEngine | RouteAdded) and decision.engine in self._slots:
            self._slots[decision.engine].end_lease()

    def _node_up(self, answers: DecisionId | None = None) -> NodeUp:
        return NodeUp(
            node=self._node,
            boot=self._store.boot,
            host_boot=self._store.host_boot,
            max_epoch=self._store.known.max_epoch,
            run=self._store.known.run,
            engines=self._tenants.reports,
            host=self._host,
            spares=self._tenants.spares(),
            spare_parts=self._tenants.places.take_parts,
            each=self._tenants.places.each,
            answers=answers,
        )


def is_called_silent(snapshot: Snapshot, node: NodeName) -> bool:
    """Whether the orchestrator waits for a word of the node; what said so may have been trimmed."""
    record = snapshot.meta.nodes.get(node) if snapshot.meta is not None else None
    return record is not None and record.silent
