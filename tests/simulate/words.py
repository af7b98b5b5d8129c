"""What was said on one job's bus, and when: for rules about words that are unread, old, or answers."""

import json
from collections import deque

from relight.events.decisions import VerifyEngine
from relight.events.ids import DecisionId, EngineName, EntryId
from tests.simulate.server import position

READ_S = 15.0
"""Who reads at all has read what was said so long ago: nobody stands still for longer."""


class Words:
    """One job's."""

    def __init__(self) -> None:
        self._unread: deque[tuple[float, tuple[int, int]]] = deque()
        """When each fact was appended, and where it stands."""
        self._answered: set[str] = set()
        """Questions that an agent has answered with a proof."""
        self._asked: dict[EngineName, DecisionId] = {}
        """What each engine's last proof was asked for by."""

    def forget(self) -> None:
        """The bus was emptied or rolled back."""
        self._unread.clear()
        self._asked.clear()

    # --- facts -------------------------------------------------------------------------------------

    def appended(self, entry_id: str, *, now_s: float) -> None:
        """A fact stands in the stream."""
        self._unread.append((now_s, position(entry_id)))

    def read(self, cursor: EntryId) -> None:
        """A commit has taken everything up to `cursor`."""
        at = position(cursor)
        while self._unread and self._unread[0][1] <= at:
            self._unread.popleft()

    def unread_s(self, cursor: EntryId, *, now_s: float) -> float:
        """For how long the first fact behind `cursor` has waited."""
        at = position(cursor)
        return next((now_s - when for when, where in self._unread if where > at), 0.0)

    # --- questions and answers ---------------------------------------------------------------------

    def said(self, strings: list[str]) -> None:
        """An agent's fact, as the fields of its entry."""
        fields = dict(zip(strings[::2], strings[1::2], strict=True))
        if fields["type"] == "Healthy":
            self._answered.add(json.loads(fields["data"]).get("answers"))

    def asked(self, verify: VerifyEngine) -> None:
        self._asked[verify.engine] = verify.id

    def unanswered(self, engine: EngineName) -> DecisionId | None:
        """The proof that was asked for last, where it has not come."""
        asked = self._asked.get(engine)
        return asked if asked is not None and asked not in self._answered else None
