"""The barrier between its threads: one lock, and whoever changes it wakes whoever waits.

The application's thread opens, exports and closes; the bus thread brings decisions. Each event is one
short turn of the pure machine under the lock, and its facts are said in the order of those turns.
"""

import logging
import threading
from collections.abc import Callable

from relight.agents.trainer import turns
from relight.agents.trainer.barrier import Barrier, Began, CaughtUp, Event, stands
from relight.agents.trainer.sync import WeightSync
from relight.events import codec
from relight.events.bus import follow
from relight.events.decisions import SyncWeights
from relight.events.errors import Undecodable
from relight.events.facts import Fact, TrainerSilent
from relight.events.values import Member

log = logging.getLogger(__name__)


class Gate:
    """The one holder of a run's barrier. Made in `begin`, by the bus thread."""

    def __init__(self, sync: WeightSync | None, *, say: Callable[[Fact], None]) -> None:
        self._say = say
        self.changed = threading.Condition()
        """Notified after each turn; its lock is the gate's."""
        self.barrier = Barrier(
            run=0, pushes=sync.pushes if sync is not None else None, subset=sync is not None and sync.subset
        )

    # --- from the session --------------------------------------------------------------------------

    def turn(self, event: Event) -> None:
        """Take `event` in and say what follows; raises UsageError for what must not be done now."""
        with self.changed:
            step = turns.after(self.barrier, event)
            self.barrier = step.barrier
            for fact in step.facts:
                self._say(fact)
            self.changed.notify_all()

    def take(self) -> SyncWeights | None:
        """The next order, which is exported from now on; None where none waits."""
        with self.changed:
            if not self.barrier.waiting:
                return None
            self.turn(Began())
            return self.barrier.running

    def next_order(self, *, until: Callable[[], bool], within_s: float | None = None) -> SyncWeights | None:
        """Wait for the next order; None once `until` holds (tell by `poke`), which goes first.

        Without `within_s` it has no deadline: it lasts as long as the application's function does.
        """
        with self.changed:
            self.changed.wait_for(lambda: until() or self.barrier.waiting, within_s)
            return None if until() else self.take()

    def poke(self) -> None:
        """Make who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def is_gone(self, member: Member) -> bool:
        """Whether a member of an open order was fenced or stopped after the order came."""
        return (member.engine, member.incarnation) in self.barrier.gone

    def is_unlisted(self, member: Member) -> bool:
        """Whether a member of the roster was fenced or stopped since."""
        return self.barrier.roster.get(member.engine) != member

    # --- from the bus thread -----------------------------------------------------------------------

    def begin(self, run: int) -> None:
        self.barrier = Barrier(run=run, pushes=self.barrier.pushes, subset=self.barrier.subset)

    def stands(self) -> Fact:
        return stands(self.barrier)

    def hear(self, event: follow.Event | None) -> None:
        match event:
            case follow.Decided():
                self.turn(event.decision)
            case follow.Synced():
                self.turn(CaughtUp(event.snapshot, tell=event.why != "start"))
            case follow.Noted():
                self._note(event)
            case follow.Away():
                log.warning("bus is away, training goes on", extra={"reason": event.reason})
            case follow.Quiet():
                pass
            case None:
                self.poke()

    def _note(self, event: follow.Noted) -> None:
        try:
            fact = codec.decode_fact(event.entry)
        except Undecodable as error:
            log.warning("decision of no known type passed over", extra={"error": str(error)})
            return
        if isinstance(fact, TrainerSilent):
            self.turn(fact)
