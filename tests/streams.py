"""Both streams of a job as anybody may read them, from their beginnings and in order."""

from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from relight.events import codec
from relight.events.bus.job import JobBus
from relight.events.decisions import Decision
from relight.events.errors import BusUnavailable
from relight.events.facts import Fact, NodeSilent, TrainerSilent
from relight.events.ids import BEGINNING

M = TypeVar("M", bound=Decision | Fact)
POLL_S = 0.02


class Streams:
    """What was said and decided so far, and what comes."""

    def __init__(self, job: JobBus) -> None:
        self.job = job
        self.facts: list[Any] = []
        self.decisions: list[Any] = []
        """With the orchestrator's own facts among them."""
        self._cursors = {"facts": BEGINNING, "decisions": BEGINNING}
        self._passed: dict[int, int] = {}

    async def read(self) -> None:
        """Take in what has come."""
        while entries := await self.job.read_facts(self._cursors["facts"]):
            self._cursors["facts"] = entries[-1].entry_id
            self.facts += map(codec.decode_fact, entries)
        while entries := await self.job.read_decisions(self._cursors["decisions"]):
            self._cursors["decisions"] = entries[-1].entry_id
            self.decisions += (
                codec.decode_fact(each) if codec.is_fact(each) else codec.decode_decision(each)
                for each in entries
            )

    async def until(
        self, kind: type[M], where: Callable[[M], bool] = lambda _: True, *, within_s: float = 20.0
    ) -> M:
        """The next message of this kind in its stream, behind the last one that was found there."""
        decided = issubclass(kind, Decision | NodeSilent | TrainerSilent)
        stream = self.decisions if decided else self.facts
        at = self._passed.get(id(stream), 0)
        with anyio.fail_after(within_s):
            while True:
                try:
                    await self.read()
                except BusUnavailable:
                    await anyio.sleep(POLL_S)
                    continue
                for index in range(at, len(stream)):
                    if isinstance(stream[index], kind) and where(stream[index]):
                        self._passed[id(stream)] = index + 1
                        return stream[index]  # type: ignore[no-any-return]
                at = len(stream)
                await anyio.sleep(POLL_S)
