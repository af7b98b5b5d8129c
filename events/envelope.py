"""One entry of a stream, as it stands on the wire."""

import msgspec

from relight.events.ids import EntryId, Source


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry's fields, decoded to text; `data` is still JSON."""

    entry_id: EntryId
    type: str
    source: Source
    time: int = 0
    """The sender's clock in ms, for people; never compared."""
    data: str
    id: str | None = None
    """The sender's own id of it (decisions: their DecisionId)."""
    after: EntryId | None = None
    """Decisions: the id of the entry before it."""
    traceparent: str | None = None
