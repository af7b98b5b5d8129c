"""The engines that live on this node: its own, those that came when their nodes were lost, and remains.

An engine that the orchestrator has elsewhere, and of which nothing is left here, makes room. Whatever else is
asked to end here is looked for and proven gone, whether anybody ever defined it or not.
"""

import logging
from collections.abc import Mapping

import anyio
from anyio.abc import TaskGroup

from relight.agents.node import marks, parts
from relight.agents.node.config import NodeFile
from relight.agents.node.errors import StartFailure
from relight.agents.node.owned import Shared
from relight.agents.node.places import Places
from relight.agents.node.record import Store
from relight.agents.node.slot import Slot
from relight.events.decisions import StartEngine, StopEngine
from relight.events.ids import EngineName, NodeName
from relight.events.schema import EngineState
from relight.events.values import EngineReport

log = logging.getLogger(__name__)


class Tenants:
    """All slots of one agent."""

    def __init__(self, file: NodeFile, store: Store) -> None:
        self.file = file
        self._store = store
        self.places = Places(file, store, is_gone=self._is_gone)
        self.slots: dict[EngineName, Slot] = {}
        """What this node reports: engines of its own and guests."""
        self._strangers: dict[EngineName, Slot] = {}
        """Engines that are not to be here, and are being proven gone or refused."""
        self._scopes: dict[EngineName, anyio.CancelScope] = {}
        self._shared: Shared | None = None
        self._tasks: TaskGroup | None = None
        self._changed = anyio.Event()
        self._reckoned: int | None = None
        """How much room the orchestrator reckons with; none before it was told."""

    # --- life --------------------------------------------------------------------------------------

    def furnish(self, shared: Shared) -> None:
        """Make the slots of the engines that are here by the node file and by what was kept."""
        self._shared = shared
        self.slots.update((engine.name, Slot(engine, shared)) for engine in self.places.here)

    def adopt(self) -> None:
        """Hold again what an earlier life of the agent left."""
        for slot in self.slots.values():
            slot.adopt()
        known = marks.engines_of(marks.slot_id(self.file.job, state_dir=self._store.directory))
        for name in sorted(known - self.slots.keys()):
            self._admit(EngineName(name))

    def run(self, tasks: TaskGroup) -> None:
        """Let every slot work in `tasks`, those to come too."""
        self._tasks = tasks
        for name, slot in self.slots.items():
            tasks.start_soon(self._work, name, slot)

    def close(self) -> None:
        """Let go of everything; it lives on."""
        for slot in (*self.slots.values(), *self._strangers.values()):
            slot.close()

    async def _work(self, name: EngineName, slot: Slot) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[name] = scope
            await slot.run()

    def _move_in(self, name: EngineName, slots: dict[EngineName, Slot]) -> Slot:
        assert self._shared is not None
        slot = slots[name] = Slot(self.places.engine(name), self._shared)
        slot.adopt()
        if self._tasks is not None:
            self._tasks.start_soon(self._work, name, slot)
        return slot

    def _move_out(self, name: EngineName, slots: dict[EngineName, Slot]) -> None:
        slots.pop(name).close()
        if scope := self._scopes.pop(name, None):
            scope.cancel()

    # --- who is here -------------------------------------------------------------------------------

    def slot_for(self, order: StartEngine | StopEngine) -> Slot:
        """The slot that is to obey `order`, which is addressed to this node."""
        name = order.engine
        if isinstance(order, StopEngine):
            return self.slots.get(name) or self._strangers.get(name) or self._move_in(name, self._strangers)
        try:
            part = parts.addressed(order).index(self.file.node)
            avoid = next((each.devices for each in order.avoid if each.node == self.file.node), ())
            engine = self.places.take(name, part, avoid=avoid)
        except StartFailure as error:
            log.warning("an engine cannot come engine=%s error=%s", name, error)
            slot = self._strangers.get(name) or self._move_in(name, self._strangers)
            slot.owned.refused = error
            self._reckoned = -1  # it was wrong
            self.changed()
            return slot
        if self._reckoned is not None:
            self._reckoned = min(self._reckoned, self.places.free())
        if name in self._strangers:
            self._move_out(name, self._strangers)
        slot = self.slots.get(name) or self._move_in(name, self.slots)
        slot.owned.config = engine
        return slot

    def place_lost(self, name: EngineName, state: EngineState) -> Slot | None:
        """The slot of an engine that the orchestrator has here; one that came and that the disk forgot."""
        return self.slots.get(name) or self._admit(name, state.nodes.index(self.file.node))

    def _admit(self, name: EngineName, part: int | None = None) -> Slot | None:
        try:
            self.places.take(name, part)
        except StartFailure as error:
            log.warning("an engine is here that should not be engine=%s error=%s", name, error)
            return None
        return self._move_in(name, self.slots)

    # --- who is elsewhere --------------------------------------------------------------------------

    def heard(self, engines: Mapping[EngineName, EngineState]) -> None:
        """Where the orchestrator has every engine."""
        node = self.file.node
        self.places.elsewhere = frozenset(name for name, state in engines.items() if node not in state.nodes)
        self.changed()

    def started(self, name: EngineName, node: NodeName) -> None:
        """The orchestrator has an engine started at `node`."""
        if node != self.file.node:
            self.places.elsewhere |= {name}
            self.changed()

    def changed(self) -> None:
        """Something may have made room, or taken it."""
        self._changed.set()

    async def room_changed(self) -> None:
        """Return when there is other room than before, who had left being gone. The caller says so."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            for name in self.places.guests:
                if name in self.places.elsewhere and self._is_gone(name):
                    log.info("a guest has left engine=%s", name)
                    self._move_out(name, self.slots)
                    self.places.leave(name)
            if self._reckoned is not None and self.places.free() != self._reckoned:
                return

    def _is_gone(self, name: EngineName) -> bool:
        slot = self.slots.get(name)
        return slot is None or (slot.owned.record.phase == "absent" and not slot.owned.foundlings)

    # --- reports -----------------------------------------------------------------------------------

    def spares(self) -> int:
        """How many more engines can come, as is told now."""
        self._reckoned = self.places.free()
        return self._reckoned

    @property
    def reports(self) -> tuple[EngineReport, ...]:
        return tuple(slot.report for slot in self.slots.values())
