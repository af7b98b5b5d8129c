"""The real follower, watched: whoever follows decisions passes over none."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from relight.events.bus.follow import Decided, Event, Follower, Noted, Synced
from relight.events.bus.job import JobBus
from relight.events.ids import BEGINNING

if TYPE_CHECKING:
    from tests.simulate.rules import Judge


class Followed(Follower):
    """A follower whose reader has heard everything up to `_heard`. `told` hears each event first."""

    def __init__(self, job: JobBus, judge: "Judge", told: Callable[[Event], object] | None = None) -> None:
        super().__init__(job)
        self._judge = judge
        self._told = told
        self._heard = BEGINNING

    async def next(self) -> Event:
        event = await super().next()
        if isinstance(event, Synced):
            self._heard = event.snapshot.tail
        elif isinstance(event, Decided | Noted):
            if event.entry.after != self._heard:
                passed = f"what was decided between {self._heard} and {event.entry.after} is passed over"
                self._judge.broken("§3", passed)
            self._heard = event.entry.entry_id
        if self._told is not None:
            self._told(event)
        return event
