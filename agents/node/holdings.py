"""What the engines of one agent hold between them: ports and processes that are nobody else's to take."""

from collections.abc import Mapping

from relight.agents.node.record import Store
from relight.agents.node.slot import Slot
from relight.events.ids import EngineName
from relight.events.values import Process


class Holdings:
    """A view of all slots; always of this moment."""

    def __init__(self, slots: Mapping[EngineName, Slot], store: Store) -> None:
        self._slots = slots
        self._store = store

    def ports(self) -> set[int]:
        """Ports in use by our engines, and those that rest."""
        recorded = (slot.owned.record.port for slot in self._slots.values())
        return {port for port in recorded if port is not None} | self._store.resting()

    def pids(self) -> set[int]:
        """All processes of our engines that live."""
        return {process.pid for slot in self._slots.values() for process in slot.owned.living}

    def owner_of(self, process: Process) -> EngineName | None:
        """The engine that a process is known to belong to."""
        return next((name for name, slot in self._slots.items() if process in slot.owned.living), None)
