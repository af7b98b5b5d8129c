"""One engine slot as its agent holds it: configuration, record, processes, client, voice.

The operations (`start`, `stop`, `weights`, `probe`) work on this; `slot` decides which one runs.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import anyio
import msgspec

from relight.agents.adapters.vllm import Client
from relight.agents.node import canary, marks, proc, shm
from relight.agents.node.compiling import Stretch
from relight.agents.node.config import Engine
from relight.agents.node.devices import Memory
from relight.agents.node.errors import StartFailure
from relight.agents.node.helper import Helper
from relight.agents.node.logs import Pump
from relight.agents.node.marks import Marks
from relight.agents.node.record import Member, Record, Store
from relight.agents.node.shortage import Shortage
from relight.agents.node.tree import Exit, Tree
from relight.events.bus.clock import BusClock
from relight.events.facts import Fact
from relight.events.ids import EngineName, JobName, NodeName
from relight.events.values import Canary, EngineReport, Process

if TYPE_CHECKING:
    from relight.agents.node.launcher import Launcher

log = logging.getLogger(__name__)


DEATH_S = 1.0
"""Longest wait for a death to be told that is seen to come."""
SOON_S = 0.005
"""For a fact to be on its way to the bus, before a disk is waited for."""
UNKNOWN_S = 30.0
"""For what an earlier life of the agent began, when no bus tells how much time is left."""


class Shared(NamedTuple):
    """What all slots of an agent have in common."""

    job: JobName
    node: NodeName
    host: str
    """Where other machines reach this one."""
    store: Store
    http: aiohttp.ClientSession
    clock: BusClock
    say: Callable[[Fact], None]
    follows: Callable[[], bool]
    """Whether decisions are followed now: only then is it known what is lent to a trainer."""
    ports: "Callable[[], set[int]]"
    """Ports that no new incarnation may take."""
    memory: Memory
    """Of the node's devices."""
    delegated: "Launcher | None"
    """Who starts engines that the agent does not start itself; none where there are no such engines."""


class Owned:
    """One engine slot."""

    def __init__(self, config: Engine, shared: Shared, *, on_exit: Callable[[Exit], None]) -> None:
        self.config = config
        self.shared = shared
        self.record = shared.store.record(config.name) or Record(engine=config.name)
        self.foundlings: dict[int, list[Process]] = {}
        """Processes that bear our tag and of which no record tells, by incarnation."""
        self.tree: Tree | None = None
        self.pump: Pump | None = None
        self.evidence: Helper | None = None
        """The command that looks at it while it hangs."""
        self.drain = anyio.CancelScope()
        """Cancelled to end the wait for running requests."""
        self.grace = anyio.CancelScope()
        """Cancelled to end the wait between SIGTERM and SIGKILL."""
        self.hurried = False
        self.refused: StartFailure | None = None
        """Why it is not to be started here, whoever asks."""
        self.stage = ""
        """What its start waits for, for people."""
        self.shortage = Shortage()
        self.compiling = Stretch(config.name)
        self._on_exit = on_exit
        self._canary = anyio.Lock()
        self._saving: asyncio.TimerHandle | None = None

    @property
    def name(self) -> EngineName:
        return self.config.name

    @property
    def up(self) -> bool:
        """It was started and nobody has told its end or asked for it."""
        return self.record.phase == "up" and not self.record.dead

    @property
    def living(self) -> tuple[Process, ...]:
        """Its processes that live, as far as they are held."""
        return self.tree.living if self.tree else ()

    @property
    def ending(self) -> bool:
        """Whether a vital process of it has ended or is about to: its refusals then mean nothing else."""
        return self.tree is not None and any(map(proc.is_exiting, self.tree.vital))

    @property
    def client(self) -> Client:
        """The engine's API; the incarnation has an address."""
        assert self.record.local is not None
        return Client(self.shared.http, self.record.local)

    async def canary(self, *, within_s: float) -> Canary:
        """The canary's generation: one at a time, so that they never pile up in an engine that is ill."""
        async with self._canary:
            return await self.client.canary(canary.PROMPT, within_s=within_s)

    @property
    def log_path(self) -> Path:
        return self.shared.store.log(self.name, self.record.incarnation)

    def save(self, *, first: bool = False, **changes: Any) -> None:
        """Change the record, on disk when this returns, or as soon as the disk takes it.

        `first`: before a step that a successor must know of; raises OSError, and nothing has changed.
        """
        record = msgspec.structs.replace(self.record, **changes)
        self.shared.store.save(record, first=first)
        self.record = record
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None

    def save_soon(self, **changes: Any) -> None:
        """Change the record, on disk once what was said with it has gone out: a disk may be slow."""
        self.note(**changes)
        if self._saving is None:
            self._saving = asyncio.get_running_loop().call_later(SOON_S, self.save)

    def note(self, **changes: Any) -> None:
        """Change the record in memory; the next `save` takes it along."""
        self.record = msgspec.structs.replace(self.record, **changes)

    def tag(self, incarnation: int) -> str:
        slot = marks.slot_id(self.shared.job, state_dir=self.shared.store.directory)
        return marks.tag_of(slot, self.name, incarnation)

    def family(self) -> dict[int, list[Process]]:
        """Live processes of any incarnation of this slot, by their tags."""
        return marks.family(marks.slot_id(self.shared.job, state_dir=self.shared.store.directory), self.name)

    def watch(self) -> Tree:
        """Hold the processes of the record's incarnation, those recorded and those found."""
        self.let_go()
        self.tree = Tree(
            Marks(self.record.tag, self.record.tmpdir, self.record.leader), on_exit=self._on_exit
        )
        for member in self.record.members:
            self.tree.add(member.process, member.role)
        self.tree.find()
        return self.tree

    def look_around(self) -> None:
        """Hold processes and note shared memory that came since the last look."""
        self.shortage.look()
        if self.tree is not None:
            self.tree.find()
            self.note_found()

    def note_found(self) -> None:
        """Note the processes that are held, and the shared memory that they map."""
        assert self.tree is not None
        try:
            segments = shm.mapped_by(self.tree.living, since_ns=self.record.began_ns)
        except OSError as error:
            log.warning("shared memory could not be looked at engine=%s error=%s", self.name, error)
            segments = set[shm.Segment]()
        known = tuple(sorted(segments.union(self.record.segments)))
        if known != self.record.segments or self.members() != self.record.members:
            self.note(segments=known, members=self.members())
            if self.up:
                self.save()

    def hurry(self) -> None:
        """Stop it without drain and grace, from now on."""
        self.hurried = True
        self.drain.cancel()
        self.grace.cancel()

    def let_go(self) -> None:
        """Stop watching; everything lives on."""
        if self.tree is not None:
            self.tree.close()
            self.tree = None

    def close(self) -> None:
        self.let_go()
        if self._saving is not None:
            self.save()
        if self.pump is not None:
            self.pump.close()
            self.pump = None
        if self.evidence is not None:
            self.evidence.close()
            self.evidence = None

    def members(self) -> tuple[Member, ...]:
        """Every process that was ever known to belong to the incarnation."""
        known = self.tree.known if self.tree else {}
        return tuple(Member(process, role) for process, role in known.items())

    def seconds_until(self, deadline_ms: int, *, at_least: float = 0.0) -> float:
        """Seconds until a deadline in bus time; `UNKNOWN_S` while the bus was never reached."""
        if not self.shared.clock.known:
            return max(UNKNOWN_S, at_least)
        return max(self.shared.clock.seconds_until(deadline_ms), at_least)

    def call_s(self, deadline_ms: int) -> float:
        """The limit of one call inside an operation: a little more than the operation's own."""
        return self.seconds_until(deadline_ms, at_least=0.0) + 1.0

    async def death_goes_first(self) -> None:
        """An engine that died fails its calls too, sometimes sooner: its death then ends the operation."""
        if self.ending:
            await anyio.sleep(DEATH_S)

    def report(self) -> EngineReport:
        """What is seen of it now."""
        assert isinstance(self.config.parts, int), "node files are checked"
        return msgspec.structs.replace(self._report(), part=self.config.part, parts=self.config.parts)

    def _report(self) -> EngineReport:
        record, living = self.record, self.living
        if self.foundlings:
            incarnation = max(self.foundlings)
            return EngineReport(
                engine=self.name,
                incarnation=incarnation,
                state="unknown",
                processes=tuple(self.foundlings[incarnation]),
            )
        match record.phase:
            case "absent":
                state = record.then if record.then != "restart" else "absent"
                return EngineReport(engine=self.name, incarnation=record.incarnation, state=state)
            case "up" if record.dead:
                return EngineReport(
                    engine=self.name, incarnation=record.incarnation, state="absent", processes=living
                )
            case "up":
                return EngineReport(
                    engine=self.name,
                    incarnation=record.incarnation,
                    state="paused" if record.paused else "up",
                    address=record.address,
                    version=record.version if record.load is None else None,
                    processes=tuple(living),
                    reloads=record.reloads,
                )
            case "starting" | "stopping":
                return EngineReport(
                    engine=self.name, incarnation=record.incarnation, state=record.phase, processes=living
                )
