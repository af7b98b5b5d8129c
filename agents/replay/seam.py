"""Stop strings that begin in kept tokens and end in new ones: the engine of a continuation cannot see them.

Only text that spans the seam is looked at; a stop string wholly in new tokens is the engine's to find.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Decodes(Protocol):
    """The part of a tokenizer that is used."""

    def decode(self, token_ids: list[int], /) -> str: ...


class Found(NamedTuple):
    """The last of `tokens` new ones completes `stop`."""

    tokens: int
    stop: str


class Seam:
    """The place between `kept` and what follows."""

    def __init__(self, tokenizer: Decodes, stops: Sequence[str], kept: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._longest = max(len(stop) for stop in stops)
        # One character can take four byte-level tokens; the margin keeps the window's first one whole.
        self._tokens = list(kept[-(4 * self._longest + 8) :])
        self._before = len(tokenizer.decode(self._tokens))
        self.passed = False
        """No stop string can span the seam any more."""

    def feed(self, token_ids: Sequence[int]) -> Found | None:
        """The first stop string across the seam that one of these tokens completes."""
        for count, token_id in enumerate(token_ids, start=1):
            self._tokens.append(token_id)
            text = self._tokenizer.decode(self._tokens)
            for stop in self._stops:
                begin = text.find(stop, max(0, self._before - len(stop) + 1))
                if 0 <= begin < self._before:
                    return Found(count, stop)
            if len(text) - self._before >= self._longest - 1:
                self.passed = True
                return None
        return None
