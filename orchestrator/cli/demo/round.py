"""One round of the two requests: sent together, and struck when the second stream's eighth chunk has come."""

from collections.abc import Callable

import aiohttp
import anyio

from relight.orchestrator.cli.demo import engine
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.evidence import Injection, Look, Piece, Plan, Turn, Witness

WITNESSED = 16
"""Tokens of each generation that a survivor is asked for."""
CHUNK = 8
"""The chunk of the second stream at which the fault strikes."""
PAUSE_S = 0.5
"""Between two generations of a witness: it shall look, not load the machine."""

Strike = Callable[[Piece], Injection]


class Striker:
    """Counts the second stream's chunks and strikes once, in the very moment in which the report is read."""

    def __init__(self, strike: Strike, finished: Callable[[], int]) -> None:
        self._strike = strike
        self._finished = finished
        self._left = CHUNK
        self._turns = finished()
        self._struck = anyio.Event()
        self.injection: Injection | None = None

    def __call__(self, piece: Piece) -> None:
        if piece.mode != "continue" or piece.attempt > 0 or self._left == 0:
            return
        self._left -= 1
        if self._left == 0 and self._finished() == self._turns:
            self.injection = self._strike(piece)
            self._struck.set()

    async def struck(self) -> Injection:
        """Wait for the fault."""
        await self._struck.wait()
        assert self.injection is not None
        return self.injection


def met_both(turns: list[Turn]) -> bool:
    """Whether the fault met both requests: each needed a second attempt."""
    return len(turns) == 2 and all(len(turn.attempts) > 1 for turn in turns)


class Witnessing:
    """Asks a survivor for one generation after another, for as long as it is let."""

    def __init__(self, look: Look, plan: Plan) -> None:
        self._look = look
        self._plan = plan
        self._complete = 0
        self._broken = 0

    async def run(self, http: aiohttp.ClientSession) -> None:
        tokens = self._plan.prompts["restart"]
        wanted = self._look.generations["restart"].token_ids[:WITNESSED]
        while True:
            try:
                made = await engine.generate(
                    http, self._look.address, tokens, max_tokens=WITNESSED, who="witness"
                )
                whole = made.token_ids == wanted
            except DemoFailed:
                whole = False
            self._complete += whole
            self._broken += not whole
            await anyio.sleep(PAUSE_S)

    @property
    def witness(self) -> Witness:
        """What came of it so far."""
        return Witness(engine=self._look.engine, complete=self._complete, broken=self._broken)
