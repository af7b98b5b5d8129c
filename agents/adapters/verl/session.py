"""The trainer's session with relight, as verl's trainers need it: full syncs, boundaries, what they export.

verl counts a step for each sync and may make several optimizer steps in it. So the live weights are those of
the last sync until the first optimizer step behind it, and of no version from there to the next sync.
"""

import logging
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import relight
from relight.agents.adapters.verl import settings
from relight.agents.adapters.verl.handing import Handing
from relight.agents.trainer.api import Scope, Trainer
from relight.agents.trainer.barrier import Phase
from relight.events.errors import UsageError

log = logging.getLogger(__name__)


class Session(AbstractContextManager["Session"]):
    """One life of a verl trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._synced: int | None = None
        self._moved = False
        self._open: Scope | None = None

    def __enter__(self) -> "Session":
        self._trainer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.waited(kind, error, trace)
        finally:
            self._trainer.__exit__(kind, error, trace)

    def sync(self, step: int) -> None:
        """Hand the live weights, verl's version `step`, to every engine that lives."""
        self._trainer.sync(step)
        self._synced, self._moved = step, False

    def moved(self) -> None:
        """An optimizer step was made."""
        self._moved = True

    def boundary(self, phase: Phase = "rollout") -> Scope:
        """While the trainer waits for rollouts: a recovery may export the last version, if it still lives."""
        if self._synced is None:
            raise UsageError("a boundary before the first sync: verl syncs before it samples")
        return self._trainer.boundary(self._synced + self._moved, phase=phase)

    def waiting(self, phase: Phase = "rollout") -> None:
        """As entering a boundary, for hooks that come in pairs."""
        self._open = self.boundary(phase)
        self._open.__enter__()

    def waited(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """As leaving it, once an export that runs is done; nothing where none is open."""
        scope, self._open = self._open, None
        if scope is not None:
            scope.__exit__(kind, error, trace)


class Managed:
    """In the place of verl's checkpoint manager at a trainer: its syncs go through the session."""

    def __init__(self, manager: Any, rollout: Any) -> None:
        """`manager`: verl's, with the replicas that it syncs; `rollout`: verl's rollout config."""
        own = settings.of(rollout)
        handing = Handing(type(manager), manager.config, manager.actor_wg, manager.replicas)
        self._manager = manager
        sync = relight.CallbackSync(handing, idempotent=True)
        self.session = Session(relight.trainer(own.bus_url, job=own.job, sync=sync, ranks="one"))
        self.session.__enter__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        """A full sync, from a thread without an event loop; no metrics of it are told."""
        self.session.sync(global_steps)
        return {}

    def finish(self, failure: BaseException | None) -> None:
        """The job ends: cleanly, unless an exception ends it."""
        self.session.__exit__(type(failure) if failure else None, failure, None)
