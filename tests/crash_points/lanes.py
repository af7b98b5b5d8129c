"""Many cases, some side by side: each lane has a world of its own, and a fresh one after a few cases.

A world goes on from case to case, so that what one death left behind would meet the next recovery. After a
broken rule it is given up and its folder is kept.
"""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio
import msgspec

from relight.orchestrator.cli.demo import processes
from tests.crash_points.layout import Recovery
from tests.crash_points.lives import reap
from tests.crash_points.points import Case, name_of
from tests.crash_points.stage import world
from tests.crash_points.visit import Visit, visit
from tests.crash_points.world import World

LANES = 2
CASES_A_WORLD = 15

Tell = Callable[[Visit, Path], None]
"""Called with each visit, and the folder of its world, which stands as long as the world or a broken rule."""


async def visit_all(
    cases: Iterable[Case],
    tell: Tell,
    *,
    recover_at: Recovery = "boundary",
    lanes: int = LANES,
    until_s: float = math.inf,
) -> None:
    """Visit every case once, in order; none is begun after `until_s` (monotonic)."""
    processes.adopt_orphans()
    waiting = list(cases)[::-1]
    async with anyio.create_task_group() as around:
        around.start_soon(reap)
        async with anyio.create_task_group() as tasks:
            for _ in range(min(lanes, len(waiting))):
                tasks.start_soon(_lane, waiting, tell, recover_at, until_s)
        around.cancel_scope.cancel()


async def _lane(waiting: list[Case], tell: Tell, recover_at: Recovery, until_s: float) -> None:
    while waiting and time.monotonic() < until_s:
        async with world(recover_at=recover_at) as here:
            for _ in range(CASES_A_WORLD):
                if not waiting or time.monotonic() >= until_s:
                    break
                found = await visit(here, waiting.pop())
                if found.broken:
                    await _keep(here, found)
                tell(found, here.root)
                if found.broken:
                    break
            if not here.kept and (left := await here.end()):
                ended = Visit((), [], [f"nothing is left at the end: {text}" for text in left])
                await _keep(here, ended)
                tell(ended, here.root)


async def _keep(here: World, found: Visit) -> None:
    """Leave everything in the folder that tells what happened."""
    here.kept = True
    text = "\n".join((f"case: {name_of(found.case) or 'no death'}", *found.broken, "", "passes:"))
    passes = "\n".join(f"  {each.pid} {each.point}{' DIES' if each.dies else ''}" for each in found.passes)
    (here.root / "broken.txt").write_text(f"{text}\n{passes}\n")
    entries = [
        *await here.job.tail(here.job.keys.facts, count=500),
        *await here.job.tail(here.job.keys.decisions, count=500),
    ]
    entries.sort(key=lambda each: tuple(map(int, each.entry_id.split("-"))))
    (here.root / "entries.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, entries)))
