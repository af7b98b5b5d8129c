"""What a trainer does without its orchestrator: hand the weights over, leave some syncs out, or end."""

import logging

from relight.agents.trainer.patience import End, OrchestratorLost
from relight.agents.trainer.settings import Settings

log = logging.getLogger(__name__)


class Alone:
    """One session's rule (`on_lost`), and how many syncs it has left out in a row."""

    def __init__(self, settings: Settings, *, pushes: bool) -> None:
        self._settings = settings
        self._pushes = pushes
        self._left_out: int | None = None
        """None before the first sync of the run: there is nothing that rollouts could go on with."""

    @property
    def grace_s(self) -> float:
        """How long an absent orchestrator is waited for at the next sync."""
        needed = self._settings.on_lost is None and not self._pushes and self._left_out is None
        return self._settings.orphan_deadline_s if needed else self._settings.orchestrator_grace_s

    def synced(self) -> None:
        """A sync went through."""
        self._left_out = 0

    def goes_on(self, end: End, *, absent_s: float) -> bool:
        """Whether the weights are handed over all the same; False: this sync is left out.

        Raises OrchestratorLost.
        """
        lost = f"{end.value} for {absent_s:.0f} s"
        if end is End.OBSERVED or self._rule(end, absent_s) == "sync":
            log.warning("weights are handed over without the orchestrator", extra={"orchestrator": lost})
            self.synced()
            return True
        if self._rule(end, absent_s) == "raise":
            raise OrchestratorLost(f"orchestrator {lost}, and only it can give the weights to the engines")
        if self._left_out is None:
            raise OrchestratorLost(f"orchestrator {lost}, and no weights of this run were synced yet")
        if self._left_out >= self._settings.max_unsynced_steps:
            raise OrchestratorLost(f"orchestrator {lost}, and {self._left_out} syncs in a row were left out")
        self._left_out += 1
        log.warning("sync left out", extra={"orchestrator": lost, "in_a_row": self._left_out})
        return False

    def _rule(self, end: End, absent_s: float) -> str:
        if self._settings.on_lost is not None:
            return self._settings.on_lost
        if self._pushes:
            return "sync"
        return "raise" if end is End.SILENT or absent_s >= self._settings.orphan_deadline_s else "unsynced"
