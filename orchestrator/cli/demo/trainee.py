"""The demo's end of the trainer's pipe: reports as they come, and what they add up to."""

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

import anyio

from relight.orchestrator.cli.demo import reports
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.evidence import Piece, Turn
from relight.orchestrator.cli.demo.reports import AnyReport, Broke, Got, Report, Returned

R = TypeVar("R", bound=Report)


class Reports:
    """What the trainer has reported. `run` reads until the trainer's end."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.all: list[AnyReport] = []
        self.on_piece: Callable[[Piece], None] | None = None
        """Called with each piece, the moment it is read."""
        self._news = anyio.Event()

    def started(self) -> None:
        """The trainer has its end of the pipe."""
        os.close(self.writing)

    async def run(self) -> None:
        reader = asyncio.StreamReader(limit=1 << 24)
        pipe = os.fdopen(self.reading, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                self._take(reports.read(line))
        finally:
            transport.close()

    def _take(self, report: AnyReport) -> None:
        self.all.append(report)
        if isinstance(report, Got) and self.on_piece is not None:
            self.on_piece(report.piece)
        self._news.set()
        self._news = anyio.Event()

    def of(self, kind: type[R]) -> list[R]:
        """Every report of one type so far."""
        return [report for report in self.all if isinstance(report, kind)]

    async def until(self, kind: type[R], *, count: int = 1, within_s: float, what: str) -> R:
        """The report of one type with that number (from 1); raises DemoFailed that names `what`."""
        with anyio.move_on_after(within_s):
            while True:
                news = self._news
                if broke := self.of(Broke):
                    raise DemoFailed(f"the {broke[0].mode} call failed: {broke[0].error}")
                if len(found := self.of(kind)) >= count:
                    return found[count - 1]
                await news.wait()
        raise DemoFailed(f"{what} did not come within {within_s:g} s")

    @property
    def pieces(self) -> list[Piece]:
        return [report.piece for report in self.of(Got)]

    @property
    def turns(self) -> list[Turn]:
        return [report.turn for report in self.of(Returned)]
