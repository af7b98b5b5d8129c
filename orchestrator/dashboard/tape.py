"""The newest entries of one job as the page shows them, each with its place in both streams.

A place is what a browser names when it comes back: the state's birth and the last entry that it has of each
stream. So it is good across browsers, followers and processes, as long as the bus keeps the same history.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from relight.events.bus.streams import position
from relight.events.envelope import Entry
from relight.events.ids import BEGINNING, EntryId
from relight.orchestrator import chronicle

LENGTH = 1000
"""Entries that are kept: what a busy recovery of many engines leaves behind, about 1 MB."""


class Place(NamedTuple):
    """Behind one entry of each stream."""

    birth: str
    facts: EntryId
    decisions: EntryId

    def __str__(self) -> str:
        return f"{self.birth}/{self.facts}/{self.decisions}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for what is no place."""
        try:
            birth, facts, decisions = text.split("/")
            position(EntryId(facts))
            position(EntryId(decisions))
        except ValueError:
            return None
        return cls(birth, EntryId(facts), EntryId(decisions))

    def has(self, entry: Entry) -> bool:
        """Whether the entry stands before it."""
        last = self.decisions if chronicle.from_decisions(entry) else self.facts
        return position(entry.entry_id) <= position(last)

    def behind(self, entry: Entry) -> "Place":
        if chronicle.from_decisions(entry):
            return self._replace(decisions=entry.entry_id)
        return self._replace(facts=entry.entry_id)


class Tape:
    """What was read last, in the order of the bus."""

    def __init__(self, birth: str, entries: Iterable[Entry] = ()) -> None:
        self.place = Place(birth, BEGINNING, BEGINNING)
        """Behind the newest entry."""
        self._entries: deque[Entry] = deque(maxlen=LENGTH)
        self.add(entries)

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._entries.append(entry)
            self.place = self.place.behind(entry)

    def newest(self, count: int) -> list[Entry]:
        return list(self._entries)[-count:]

    def since(self, place: Place) -> list[Entry] | None:
        """Those behind `place`; None where it is of another history, or some may be missing."""
        if place.birth != self.place.birth or not self._reaches(place):
            return None
        return [entry for entry in self._entries if not place.has(entry)]

    def _reaches(self, place: Place) -> bool:
        """Whether the oldest entry of each stream that is kept stands at or before `place`, which itself
        stands before the end."""
        oldest = self.place
        for entry in reversed(self._entries):
            oldest = oldest.behind(entry)
        return all(
            position(first) <= position(asked) <= position(last)
            for first, asked, last in zip(oldest[1:], place[1:], self.place[1:], strict=True)
        )


def as_line(entry: Entry) -> dict[str, Any]:
    """An entry as `relight events --format json` has it, with the words of its line beside it."""
    told = chronicle.told(entry)
    words = {"who": told.who, "of": told.of, "reason": told.reason, "gist": told.gist}
    return {**chronicle.as_on_bus(entry), **words}
