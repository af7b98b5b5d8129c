"""A boundary as a scope: weights may be exported in it, in a thread of its own, while the body runs."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread

from relight.agents.trainer.barrier import Closed, Opened
from relight.agents.trainer.gate import Gate
from relight.events.decisions import SyncWeights


class Boundary:
    """`with` or `async with`. Leaving it waits for an export that is running, and for nothing else."""

    def __init__(
        self, gate: Gate, *, opening: Callable[[], Opened], export: Callable[[SyncWeights], object]
    ) -> None:
        self._gate = gate
        self._opening = opening
        self._export = export
        self._leaving = False
        self._thread = threading.Thread(target=self._serve, name="relight-export", daemon=True)

    def __enter__(self) -> Self:
        self._gate.turn(self._opening())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leaving = True
            self._gate.poke()
            self._thread.join()
        finally:
            self._gate.turn(Closed())

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.__exit__, kind, error, trace)

    def _serve(self) -> None:
        while (order := self._gate.next_order(until=lambda: self._leaving)) is not None:
            self._export(order)
