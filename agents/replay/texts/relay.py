"""The ledger of an answer that no token ids stand behind: what is there of it, and whether it is whole. Pure.

Nothing of it can go on after a death; it is given anew as long as none of it has gone out.
"""

import msgspec

from relight.agents.replay.delivery import Delivery
from relight.agents.replay.ledger import Ask, News
from relight.agents.replay.strand import Malformed
from relight.agents.replay.texts.words import Said
from relight.agents.replay.wire import Delta, Failure, ScoredChunk, ScoredDelta

UNASKED = frozenset({"abort", "error"})
"""Finish reasons that are the attempt's and not the answer's."""


class Relay(Delivery):
    """`choices`: how many of them come. Whole with the end mark, or with the body where that is no stream."""

    def __init__(self, choices: int, *, why: str) -> None:
        super().__init__([], {})
        self._choices = choices
        self._why = why
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._held: list[bytes] = []
        self._finished: set[int] = set()
        self._whole = False

    @property
    def complete(self) -> bool:
        return self._whole

    def settle(self) -> bool:
        return self._whole

    def why_replayed(self, version: str) -> str | None:
        return self._why

    def ask(self, *, attempt: int, version: str) -> Ask:
        self._forget()
        return Ask([], {}, 0, None)

    def feed(self, delta: Delta) -> News | None:
        assert isinstance(delta, Said)
        if delta.part == "end":
            if len(self._finished) < self._choices:
                raise Malformed(
                    f"the end came with {len(self._finished)} of {self._choices} choices finished"
                )
            self._whole = True
        if delta.payload:
            self._held.append(delta.payload)
        if delta.part == "preamble":
            return None  # nothing of the answer yet: a death may still give it anew
        if delta.finish_reason is not None and delta.finish_reason not in UNASKED:
            self._finished.add(delta.index)
        for payload in self._held:
            self._give(payload)
        self._held.clear()
        return News(delta.index, 0, [], None)


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Body(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: Failure | str | None = None


def body(content: bytes) -> ScoredChunk:
    """A whole answer as its one chunk, without an end where a choice has none that is its own; raises
    MsgspecError for what is no answer.
    """
    read = msgspec.json.decode(content, type=_Body)
    told: list[ScoredDelta] = [
        Said(index=index, finish_reason=choice.finish_reason) for index, choice in enumerate(read.choices)
    ]
    if not any(choice.finish_reason in UNASKED for choice in read.choices):
        told.append(Said(index=0, part="end", payload=content))
    return ScoredChunk(told, "", read.error)
