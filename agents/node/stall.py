"""Watching an engine whose processes live: one question at a time to its core, and its counters.

The question stays open as long as the core is silent, so that questions never pile up in an engine that is
ill. While the engine is starting, stopping, loading or lent to a trainer's push nothing is judged. Nor is a
further part of an engine over several nodes ever: it has no server, and a hang of it is seen at the head.
"""

import errno
import logging
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio
from anyio.abc import TaskGroup

from relight.agents.adapters.vllm import CanaryAborted, EngineRefused, EngineUnreachable
from relight.agents.node.owned import Owned
from relight.agents.node.vigil import Verdict, Vigil
from relight.events.bus.clock import monotonic_ms
from relight.events.facts import PauseExpired

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Between two looks, or a fifth of the engine's `stall_s`. An idle engine costs one small request a tick."""
LOOK_EVERY = 30
"""Ticks between two searches for processes and shared memory that came after the start."""
LOOK_AT_PART_EVERY = 3
"""The same of a further part, of which processes are all that is seen."""
COUNTERS_EVERY = 5
"""Ticks between two readings of /metrics while the core answers; each tick when it does not."""
STOOD_STILL = 3.0
"""Ticks that one tick's sleep may last before nothing is concluded from what came before it."""
METRICS_S = 2.0
DRAIN_POLL_S = 0.05
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Watchman:
    """Judges one slot's engine for as long as it is up. `die` is told why it is dead."""

    def __init__(self, owned: Owned, *, die: Callable[[str, float], None]) -> None:
        self.leased_until_s = 0.0
        """Monotonic time until which a trainer may pause it and load into it."""
        self._owned = owned
        self._tick_s = min(TICK_S, owned.config.stall_s / 5)
        self._place = zlib.crc32(owned.name.encode()) / (1 << 32)
        """Where in a tick, and in a round of `LOOK_EVERY` ticks, this engine has its turn: 0 to 1."""
        self._die = die
        self._excuses = 0
        self._vigil: Vigil | None = None
        self._asking: anyio.CancelScope | None = None
        self._incarnation = 0
        self._paused_answers = 0

    def is_lent(self) -> bool:
        """Whether a trainer may pause it and write into it now."""
        return _now() < self.leased_until_s

    @contextmanager
    def excused(self) -> Generator[None]:
        """While a load runs, whose own deadline bounds it."""
        self._excuses += 1
        try:
            yield
        finally:
            self._excuses -= 1
            self._vigil = None

    async def run(self) -> None:
        """Watch for ever."""
        async with anyio.create_task_group() as tasks:
            await anyio.sleep(self._tick_s * self._place)  # engines of one node are looked at one by one
            ticks = int(LOOK_EVERY * self._place)
            while True:
                asleep = _now()
                await anyio.sleep(self._tick_s)
                ticks, now = ticks + 1, _now()
                if now - asleep > STOOD_STILL * self._tick_s:
                    self._vigil = None  # this process stood still, and perhaps all others did
                if self._owned.config.part:
                    self._look_at_part(ticks)
                elif self._watched(now):
                    await self._tick(tasks, ticks)

    def _look_at_part(self, ticks: int) -> None:
        """Its workers come after its start was told, and the end of any of them is the engine's."""
        if self._owned.up and ticks % LOOK_AT_PART_EVERY == 0:
            self._owned.look_around()

    def _watched(self, now: float) -> bool:
        owned = self._owned
        if not owned.up or self._excuses or self.is_lent():
            self._vigil = None
            self._stop_asking()
            return False
        if self._vigil is None or self._incarnation != owned.record.incarnation:
            self._stop_asking()
            self._incarnation = owned.record.incarnation
            self._vigil = Vigil(stall_s=owned.config.stall_s, now=now)
            self._owned.compiling.over()
            self._paused_answers = 0
        return True

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _tick(self, tasks: TaskGroup, ticks: int) -> None:
        vigil = self._vigil
        assert vigil is not None
        if ticks % LOOK_EVERY == 0:
            self._owned.look_around()
        if self._asking is None:
            self._asking = anyio.CancelScope()
            tasks.start_soon(self._ask, vigil, self._asking)
        if ticks % COUNTERS_EVERY == 0 or vigil.blind or _now() - vigil.alive > 1.5 * self._tick_s:
            await self._count(vigil)
        if vigil is not self._vigil or not self._owned.up:
            return
        if self._owned.record.paused or self._paused_answers:
            vigil.held(_now())
        else:
            vigil.released()
        match vigil.verdict(_now()):
            case Verdict.WELL:
                self._owned.compiling.over()
            case Verdict.STALLED if self._compiles(vigil):
                return
            case Verdict.STALLED:
                silent_s = _now() - vigil.alive
                self._die(f"no answer from its core and no progress for {silent_s:.1f} s", silent_s * 1000.0)
            case Verdict.DOUBTFUL:
                await self._try_out(vigil)

    def _compiles(self, vigil: Vigil) -> bool:
        return self._owned.compiling.goes_on(self._owned.tree, now=_now(), gap_s=vigil.window_s)

    async def _ask(self, vigil: Vigil, scope: anyio.CancelScope) -> None:
        owned = self._owned
        with scope:
            try:
                paused = await owned.client.is_paused(within_s=6 * owned.config.stall_s)
            except EngineUnreachable as error:
                if error.errno in NO_DESCRIPTORS:
                    vigil.excuse(_now())
            except EngineRefused as error:
                log.info("its core did not answer engine=%s error=%s", owned.name, error)
            else:
                vigil.answered(_now())
                self._note_paused(paused)
        if self._asking is scope:
            self._asking = None

    def _note_paused(self, paused: bool) -> None:
        """A pause that is not ours and that no lease covers has outlived its owner."""
        record = self._owned.record
        foreign = self._paused_answers + 1 if paused and not record.paused else 0
        if foreign == 2 and (_now() < self.leased_until_s or not self._owned.shared.follows()):
            return
        self._paused_answers = foreign
        if self._paused_answers == 2:
            self._owned.shared.say(PauseExpired(engine=record.engine, incarnation=record.incarnation))

    async def _count(self, vigil: Vigil) -> None:
        try:
            counters = await self._owned.client.counters(within_s=METRICS_S)
        except EngineUnreachable as error:
            if error.errno in NO_DESCRIPTORS:
                vigil.excuse(_now())
            return
        vigil.told(_now(), counters)

    async def _try_out(self, vigil: Vigil) -> None:
        stall_s = vigil.window_s
        try:
            if await self._asleep(stall_s):
                vigil.held(_now())
                return
            await self._owned.canary(within_s=stall_s)
        except CanaryAborted:
            vigil.excuse(_now())
        except (EngineUnreachable, EngineRefused) as error:
            if vigil is not self._vigil or not self._owned.up or vigil.verdict(_now()) is Verdict.WELL:
                return
            if not self._compiles(vigil):
                self._die(f"calls wait, no token comes, and the canary fails: {error}", stall_s * 1000.0)
        else:
            vigil.excuse(_now())

    async def _asleep(self, within_s: float) -> bool:
        try:
            return await self._owned.client.is_sleeping(within_s=within_s)
        except EngineRefused:  # no such route: it cannot sleep either
            return False


async def drained(owned: Owned) -> None:
    """Return when no request runs or waits. The caller gives the deadline."""
    while True:
        try:
            counters = await owned.client.counters(within_s=METRICS_S)
        except (EngineUnreachable, EngineRefused) as error:
            log.info("draining ends: the engine does not answer engine=%s error=%s", owned.name, error)
            return
        if counters is not None and counters.running + counters.waiting == 0:
            return
        await anyio.sleep(DRAIN_POLL_S)


def _now() -> float:
    return monotonic_ms() / 1000.0
