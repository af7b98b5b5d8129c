"""One request as the server sees it: its sequences, what of them has come and what has been sent."""

import asyncio
from typing import Any

from relight.agents.stub.tokens import Token


class Part:
    """One sequence of a generation as far as it has come; `starts` are (label, first token) pairs.

    `sent` tokens have gone to the client, and the finish too once `told`.
    """

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.starts: list[tuple[str, int]] = []
        self.finish: str | None = None
        self.stop: int | None = None
        self.sent = 0
        self.told = False

    def spans(self) -> list[dict[str, Any]]:
        """Which weights made which tokens, as vLLM's `weight_versions`."""
        ends = [*(start for _, start in self.starts), len(self.tokens)][1:]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.starts, ends, strict=True)
        ]


class Generation:
    """One request: its parts, its error if it has one, and an event for each change."""

    def __init__(self, number: int, request_id: str, sequences: int) -> None:
        self.number = number
        self.request_id = request_id
        self.parts = [Part() for _ in range(sequences)]
        self.scores: list[Token | None] = []
        self.error = ""
        self.changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing more can come."""
        return bool(self.error) or all(part.finish for part in self.parts)
