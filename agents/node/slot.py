"""One engine slot: which operation runs, and what a process's end means.

Invariant: one operation at a time; a StopEngine interrupts every other one, a death ends them. Commands are
level-triggered: one that is done already is answered with its fact again, one for another incarnation than
the present or the next changes nothing. An incarnation's death is told once, or twice where the agent dies
too.
"""

import logging

import anyio

from relight.agents.adapters.vllm import EngineRefused, EngineUnreachable
from relight.agents.node import evidence, foundlings, lifecycle, verify, weights
from relight.agents.node.config import Engine, device
from relight.agents.node.errors import StartFailure
from relight.agents.node.inquest import Inquest, Verdict
from relight.agents.node.logs import last_lines
from relight.agents.node.marks import VITAL
from relight.agents.node.owned import Owned, Shared
from relight.agents.node.pidfd import Status
from relight.agents.node.probe import probe
from relight.agents.node.stall import Watchman
from relight.agents.node.tree import Exit
from relight.events.bus.clock import monotonic_ms
from relight.events.decisions import (
    LoadWeights,
    ProbeEngine,
    StartEngine,
    StopEngine,
    SyncWeights,
    VerifyEngine,
)
from relight.events.facts import EngineDead
from relight.events.schema import Command, EngineState
from relight.events.values import Cause, EngineReport

log = logging.getLogger(__name__)

DETAIL_LINES = 6
"""Of its log, told with a death."""
ASK_S = 2.0
"""Limit of asking an adopted engine whether it is paused; its watch goes on asking."""
LOOK_S = 2.0
"""Limit of a look at the server after a process of no known role has ended."""


class Slot:
    """One engine. `obey` may be called at any time; `run` does the work."""

    def __init__(self, config: Engine, shared: Shared) -> None:
        self.owned = Owned(config, shared, on_exit=self._on_exit)
        self._pending: dict[type, Command] = {}
        self._wake = anyio.Event()
        self._running: Command | None = None
        self._scope: anyio.CancelScope | None = None
        self._look = False
        self._inquest = Inquest(self.owned, tell=self._die)
        self._watchman = Watchman(self.owned, die=self._stalled)

    @property
    def report(self) -> EngineReport:
        return self.owned.report()

    def close(self) -> None:
        """Let go of everything; it lives on."""
        self._inquest.close()
        self.owned.close()

    # --- commands ----------------------------------------------------------------------------------

    def obey(self, command: Command) -> None:
        """Do `command`, as soon as what it interrupts has ended."""
        if isinstance(command, StopEngine):
            running, present = self._running, self.owned.record.incarnation
            if isinstance(running, StopEngine) and running.incarnation == command.incarnation == present:
                self.owned.note(stop=command)  # asked again meanwhile: the answer names the newest
                if command.drain_s == 0:
                    self.owned.drain.cancel()
                return
            self._pending.clear()
            if self._hung():
                evidence.begin(self.owned)
            self._interrupt()
        elif command == self._running:
            return
        self._pending[type(command)] = command
        self._wake.set()

    def lease(self, order: SyncWeights) -> None:
        """A trainer may push weights into it until `order`'s deadline: paused and silent is well then."""
        self._watchman.leased_until_s = monotonic_ms() / 1000.0 + self.owned.seconds_until(order.deadline)

    def end_lease(self) -> None:
        """The sync is over for it, or pulled: what it does and does not do is its own again."""
        self._watchman.leased_until_s = 0.0

    async def recall(self, state: EngineState) -> None:
        """Take up an incarnation of which only the orchestrator knows."""
        if foundlings.recall(self.owned, state):
            log.info("recalled engine=%s.%d", self.owned.name, state.incarnation)
            await self._ask_paused()

    def _hung(self) -> bool:
        """Whether what a stop interrupts had its time: the orchestrator reads the same deadlines."""
        owned = self.owned
        match self._running:
            case StartEngine(deadline=deadline):
                late = owned.record.phase == "starting"
            case LoadWeights(deadline=deadline):
                late = owned.up and owned.record.load is not None
            case VerifyEngine(deadline=deadline):
                late = owned.up
            case _:
                return False
        return late and owned.seconds_until(deadline) <= evidence.LATE_S

    def _interrupt(self) -> None:
        if self._scope is not None and not isinstance(self._running, StopEngine):
            self._scope.cancel()

    async def run(self) -> None:
        """Work for ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watchman.run)
            await self._take_up()
            while True:
                while self._pending:
                    self._running = self._pending.pop(next(iter(self._pending)))
                    with anyio.CancelScope() as self._scope:
                        await self._do(self._running)
                    self._running = self._scope = None
                if self._look:
                    self._look = False
                    with anyio.CancelScope() as self._scope:
                        await self._look_at_server()
                    self._scope = None
                await self._wake.wait()
                self._wake = anyio.Event()

    async def _do(self, command: Command) -> None:
        log.info("obeying %s engine=%s.%d", type(command).__name__, command.engine, command.incarnation)
        match command:
            case StartEngine():
                await lifecycle.begin(self.owned, command)
            case StopEngine():
                await lifecycle.end(self.owned, command)
            case _ if self.owned.config.part:
                log.info("that is the head's to do engine=%s.%d", command.engine, command.incarnation)
            case _ if not self.owned.up or command.incarnation != self.owned.record.incarnation:
                log.info("that incarnation is not up engine=%s.%d", command.engine, command.incarnation)
            case ProbeEngine():
                if stalled := await probe(self.owned, command, lent=self._watchman.is_lent):
                    self._stalled(stalled.detail, stalled.silent_ms)
            case LoadWeights():
                with self._watchman.excused():
                    await weights.load(self.owned, command)
            case VerifyEngine():
                with self._watchman.excused():
                    await verify.verify(self.owned, command)

    # --- adoption ----------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Hold again what an earlier life of the agent left, and tell the deaths that it did not see."""
        owned = self.owned
        record = owned.record
        if record.phase == "absent":
            owned.foundlings = owned.family()
            return
        if record.host_boot != owned.shared.store.host_boot:
            owned.note(members=(), leader=None)
        tree = owned.watch()
        log.info("adopted engine=%s.%d phase=%s", owned.name, record.incarnation, record.phase)
        if not owned.up:
            return
        vital = [member for member in record.members if member.role in VITAL]
        gone = [member for member in vital if member.process not in tree.living]
        if gone or not vital:
            what = f"its {gone[0].role} (pid {gone[0].process.pid})" if gone else "the whole machine"
            self._die(Verdict(Cause.EXIT, Status(), f"{what} ended while no agent was watching", None))

    async def _take_up(self) -> None:
        """Finish what an earlier life began."""
        owned = self.owned
        record = owned.record
        if record.phase == "starting" and record.start is not None:
            error = StartFailure("interrupted", "the agent ended while it was starting")
            await lifecycle.failed(owned, error, record.start)
        elif record.phase == "stopping" and not self._pending:
            await lifecycle.end_present(owned)
        elif owned.up:
            if record.load is not None:
                text = "the agent ended during the load"
                owned.shared.say(weights.load_failed(record.load, text, touched=True))
                owned.save(load=None, version=None, digest=None)
            await self._ask_paused()

    async def _ask_paused(self) -> None:
        """What the record cannot know: an agent may die between its resume and the note of that.

        A pause is noted before it is made: one that the record does not know is not ours.
        """
        owned = self.owned
        if owned.config.part or not owned.record.paused:
            return
        try:
            if not await owned.client.is_paused(within_s=ASK_S):
                owned.save(paused=False)
        except (EngineUnreachable, EngineRefused) as error:
            log.warning("adopted, and it does not answer engine=%s error=%s", owned.name, error)

    # --- deaths ------------------------------------------------------------------------------------

    def _on_exit(self, exited: Exit) -> None:
        if not self.owned.up:
            return
        if exited.role not in VITAL:
            self._look = self.owned.config.part == 0
            self._wake.set()
            return
        self._inquest.hear(exited)

    async def _look_at_server(self) -> None:
        if not self.owned.up:
            return
        try:
            if await self.owned.client.health(within_s=LOOK_S):
                return
        except EngineUnreachable as error:
            log.info("no answer yet; its watch goes on engine=%s error=%s", self.owned.name, error)
            return
        self._die(Verdict(Cause.EXIT, Status(), "a process of it ended and /health is not 200", None))

    def _stalled(self, detail: str, detect_ms: float) -> None:
        """A call that fails may be seen to fail before the end of the process that made it fail."""
        incarnation = self.owned.record.incarnation

        def tell() -> None:
            if incarnation == self.owned.record.incarnation:
                self._die(Verdict(Cause.STALL, Status(), detail, None), detect_ms=detect_ms)

        self._inquest.if_nothing_ends(tell)

    def _die(self, verdict: Verdict, *, detect_ms: float | None = None) -> None:
        """Tell the death, once. For an exit `detect_ms` runs from the moment the kernel told us: what came
        before that, microseconds, nobody can know."""
        owned = self.owned
        if not owned.up:
            return
        lines = last_lines(owned.log_path, DETAIL_LINES)
        if verdict.seen_ms is not None:
            detect_ms = monotonic_ms() - verdict.seen_ms
        owned.shared.say(
            EngineDead(
                engine=owned.name,
                incarnation=owned.record.incarnation,
                node=owned.shared.node,
                cause=verdict.cause,
                exit_code=verdict.status.code,
                signal=verdict.status.signal,
                detail="\n".join((verdict.detail, *lines)),
                detect_ms=detect_ms,
                device=device(owned.config),
            )
        )
        log.warning(
            "dead engine=%s.%d cause=%s detail=%r",
            *(owned.name, owned.record.incarnation, verdict.cause.value, verdict.detail),
        )
        if verdict.cause is Cause.STALL:
            evidence.begin(owned)
        owned.save_soon(dead=True)
        self._interrupt()
