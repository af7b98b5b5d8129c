"""Bringing a world up, as far as each case begins, and clearing it away whatever happened in it."""

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
from anyio.abc import TaskGroup

from relight.events.bus.client import open_bus
from relight.events.bus.embedded import embedded
from relight.events.schema import Snapshot
from tests.crash_points.layout import JOB, STRUCK, Recovery, checksums, write
from tests.crash_points.lives import OURS, Service
from tests.crash_points.world import POLL_S, World, serves

ROOT = Path(__file__).parents[2]
UP_S = 60.0


@asynccontextmanager
async def world(
    *, recover_at: Recovery = "boundary", orchestrator: Sequence[str] | None = None
) -> AsyncIterator[World]:
    """A world whose two engines serve the trainer's weights. What is left of it at the end is killed.

    `orchestrator`: what runs `relight orchestrate` in the victim's place.

    Its folder is removed unless it is `kept` or the block raises an error.
    """
    root = Path(tempfile.mkdtemp(prefix="relight-cp-"))
    kept = False
    try:
        commands = write(root, recover_at, orchestrator)
        async with (
            embedded(root / "bus") as server,
            open_bus(server.url) as bus,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
            anyio.create_task_group() as tasks,
        ):
            OURS.add(server.process.pid)
            here = World(root, server=server, job=bus.job(JOB), http=http)
            try:
                await _bring_up(here, tasks, commands)
                yield here
                kept = here.kept
            finally:
                here.sweep()
                tasks.cancel_scope.cancel()
                OURS.discard(server.process.pid)
    except Exception:
        kept = True
        raise
    finally:
        if not kept:
            shutil.rmtree(root)


async def _bring_up(here: World, tasks: TaskGroup, commands: dict[str, list[str]]) -> None:
    env = {**os.environ, "TMPDIR": str(here.root / "tmp"), "RELIGHT_BUS_URL": here.server.url}
    watch = [sys.executable, "-m", "tests.crash_points.watcher", here.mark, str(here.root / "sights")]
    trainer = str(ROOT / "benchmarks/waiting_trainer.py")
    train = [sys.executable, trainer, here.server.url, JOB, str(here.root / "weights")]
    for name, command in {"watcher": watch, **commands, "trainer": train}.items():
        service = Service(name, command, log=here.root / f"{name}.log", env=env)
        here.services[name] = service
        if name == "trainer":
            base = await here.until("both engines serve their base", _all_serve, UP_S)
            address = base.engines[STRUCK].address
            assert address is not None
            made = (await here.ask(address)).generation
        service.start(tasks, again=name in commands)
    await here.until("both engines serve the trainer's weights", _all_serve_synced, UP_S)
    with anyio.fail_after(UP_S):
        while not await here.at_rest():
            await anyio.sleep(POLL_S)
    found = (await here.state()).engines[STRUCK]
    assert found.route is not None
    here.reference = await here.ask(found.route.address)
    assert here.reference.checksums == checksums()
    assert here.reference.generation != made, "the weights must be told by what is generated"
    assert here.reference.label == str(found.route.version)


def _all_serve(snapshot: Snapshot) -> bool:
    return len(snapshot.engines) == 2 and all(map(serves, snapshot.engines.values()))


def _all_serve_synced(snapshot: Snapshot) -> bool:
    routes = [engine.route for engine in snapshot.engines.values()]
    return _all_serve(snapshot) and all(route is not None and route.version.run > 0 for route in routes)
