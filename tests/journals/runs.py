"""The real runs that are recorded: every process is real, and the bus keeps what was decided.

A run ends with what stood in the stream of decisions, read from the server; the journal is accepted only if
its commits are that, in order and byte by byte.
"""

import logging
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import redis.asyncio as redis

from relight.events.bus.embedded import embedded
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable
from relight.events.ids import BEGINNING, EntryId
from relight.orchestrator.cli.demo import layout, processes, report
from relight.orchestrator.cli.demo.evidence import Fault, Kind
from relight.orchestrator.cli.demo.layout import Place
from relight.orchestrator.cli.demo.play import play
from tests.crash_points.layout import STRUCK
from tests.crash_points.lives import OURS, reap
from tests.crash_points.stage import world
from tests.crash_points.world import POLL_S, SETTLE_S, World
from tests.journals import journal
from tests.journals.journal import AnyLine, Bus, Call, Commit, Given

log = logging.getLogger(__name__)
FAULTS: tuple[Fault, ...] = ("kill-core", "kill-server", "stall", "kill-agent", "kill-orchestrator")


class Run(NamedTuple):
    """One journal's origin. `play` writes it to the given file and returns what stood on the bus."""

    name: str
    play: Callable[[Path], Awaitable[Sequence[Entry]]]


def recording(path: Path) -> list[str]:
    return [sys.executable, "-m", "tests.journals.recording", str(path)]


async def demo(
    path: Path, *, kind: Kind, fault: Fault, engines: int = 1, recover_at: Any = "boundary"
) -> Any:
    """One demo, with its recovery. What is made of it in its audit is the demo's own affair."""
    plan = layout.plan(kind, engines=engines, fault=fault, recover_at=recover_at)
    relight, layout.RELIGHT = layout.RELIGHT, (*recording(path),)
    with tempfile.TemporaryDirectory(prefix="relight-journal-") as root:
        try:
            evidence = await play(plan, Place(Path(root)), report.progress(as_json=False))
        finally:
            layout.RELIGHT = relight
    return evidence.decisions


async def emptied_bus(path: Path) -> Sequence[Entry]:
    """An engine is lost and given back; the bus is emptied; another one is lost."""
    async with _recorded(path) as here:
        await _lose(here)
        stood = await _decisions(here, BEGINNING)
        client = redis.Redis.from_url(here.server.url)
        await client.flushall()
        await client.aclose()
        await _rest(here)
        await _lose(here)
        return [*stood, *await _decisions(here, BEGINNING)]


async def rolled_back_bus(path: Path) -> Sequence[Entry]:
    """The server is replaced by an older self that does not know of the last recovery."""
    async with _recorded(path) as here:
        await _lose(here)
        older = shutil.copytree(here.root / "bus", here.root / "older", ignore=shutil.ignore_patterns("lock"))
        tail = (await here.job.snapshot()).tail
        await _lose(here)
        stood = await _decisions(here, BEGINNING)
        await anyio.to_thread.run_sync(here.server.stop)
        async with embedded(older, port=here.server.port) as server:
            OURS.add(server.process.pid)
            await _rest(here)
            await _lose(here)
            again = await _decisions(here, tail)
            here.sweep()
        return [*stood, *again]


def _recorded(path: Path) -> Any:
    return world(orchestrator=recording(path))


async def _lose(here: World) -> None:
    """Kill the engine's core and wait until it serves again."""
    lost = here.newest(STRUCK)
    here.strike(lost)
    with anyio.fail_after(SETTLE_S):
        while here.newest(STRUCK) == lost:
            await anyio.sleep(POLL_S)
    await _rest(here)


async def _rest(here: World) -> None:
    """Wait until everybody serves and the state is that of the engines that live."""
    with anyio.fail_after(SETTLE_S):
        while True:
            try:
                engines = (await here.job.snapshot()).engines
                newest = STRUCK in engines and engines[STRUCK].incarnation == here.newest(STRUCK).incarnation
                if newest and await here.at_rest():
                    return
            except BusUnavailable:
                log.debug("the bus is away for the moment")
            await anyio.sleep(POLL_S)


async def _decisions(here: World, after: EntryId) -> list[Entry]:
    entries: list[Entry] = []
    while more := await here.job.read_decisions(after):
        entries += more
        after = more[-1].entry_id
    return entries


RUNS = (
    *(Run(f"stub-{fault}", partial(demo, kind="stub", fault=fault)) for fault in FAULTS),
    Run("stub-two-engines", partial(demo, kind="stub", fault="kill-core", engines=2)),
    Run("stub-snapshot", partial(demo, kind="stub", fault="kill-core", recover_at="snapshot")),
    Run("vllm-kill-core", partial(demo, kind="vllm", fault="kill-core")),
    Run("emptied-bus", emptied_bus),
    Run("rolled-back-bus", rolled_back_bus),
)


async def record(run: Run) -> Path:
    """Play the run and keep its journal."""
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="relight-journal-") as folder:
        path = Path(folder, "journal")
        if run.play in (emptied_bus, rolled_back_bus):
            async with anyio.create_task_group() as around:
                around.start_soon(reap)
                entries = await run.play(path)
                around.cancel_scope.cancel()
        else:
            entries = await run.play(path)
        lines = stood([*journal.read(path)], [entry.data for entry in entries])
    journal.FOLDER.mkdir(exist_ok=True)
    kept = journal.FOLDER / f"{run.name}.jsonl"
    kept.write_bytes(b"".join(map(journal.written, lines)))
    return kept


def stood(lines: Sequence[AnyLine], on_bus: Sequence[str]) -> list[AnyLine]:
    """The journal, its commits compared with what stood on the bus; raises ValueError where they differ."""
    out: list[AnyLine] = []
    pending: list[str] = []
    at = 0
    for number, line in enumerate(lines, start=1):
        out.append(line)
        match line:
            case Given():
                pending = []
            case Call():
                pending += [bytes(raw).decode() for raw in line.decisions]
            case Commit():
                mine, pending = pending, []
                if list(on_bus[at : at + len(mine)]) == mine:
                    at += len(mine)
                elif any(isinstance(later, Given) for later in lines[number : number + 1]):
                    out[-1] = msgspec.structs.replace(line, stood=False)
                else:
                    raise ValueError(
                        f"commit {line.number} (line {number}) does not stand on the bus: {mine}"
                    )
            case Bus():
                raise ValueError("it has been compared before")
    if at != len(on_bus):
        raise ValueError(f"{len(on_bus) - at} decisions on the bus are in no commit: {on_bus[at:][:2]}")
    return [*out, Bus(count=len(on_bus), digest=journal.digest(on_bus))]
