"""A whole job for tests: a real orchestrator, real agents with stub engines, and a trainer's session."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import anyio
from safetensors.numpy import load_file

import relight
from relight.agents.node.config import NodeFile
from relight.events.bus.client import open_bus
from relight.events.bus.follow import Decided, Follower
from relight.events.bus.job import JobBus
from relight.events.decisions import Decision, RouteAdded
from relight.events.ids import EngineName
from relight.orchestrator import service
from relight.orchestrator.settings import Settings, SettingsFile
from tests.conftest import write_model
from tests.node_support import JOB, running, swept
from tests.scenario import short

WITHIN_S = 60.0
D = TypeVar("D", bound=Decision)


class Watch:
    """Everything that was decided since the job began."""

    def __init__(self, job: JobBus) -> None:
        self.job = job
        self.decided: list[Decision] = []
        self._more = anyio.Event()

    async def run(self) -> None:
        follower = Follower(self.job)
        while True:
            event = await follower.next()
            if isinstance(event, Decided):
                self.decided.append(event.decision)
                self._more.set()
                self._more = anyio.Event()

    def all(self, kind: type[D], where: Callable[[D], bool] = lambda _: True) -> list[D]:
        return [each for each in self.decided if isinstance(each, kind) and where(each)]

    async def until(self, kind: type[D], where: Callable[[D], bool] = lambda _: True) -> D:
        """The first such decision, whenever it was taken."""
        with anyio.move_on_after(WITHIN_S):
            while not (found := self.all(kind, where)):
                await self._more.wait()
            return found[0]
        told = "\n".join(f"{short(each)}: {each.reason}" for each in self.decided)
        raise AssertionError(f"no such {kind.__name__} within {WITHIN_S:g} s among\n{told}")

    async def routed(self, name: EngineName, incarnation: int, *, step: int | None = None) -> RouteAdded:
        def fits(route: RouteAdded) -> bool:
            named = (route.engine, route.incarnation) == (name, incarnation)
            return named and (step is None or (route.version.run > 0 and route.version.step == step))

        return await self.until(RouteAdded, fits)

    async def knobs(self, name: EngineName, **changes: Any) -> None:
        """Set faults of the stub that is routed under this name."""
        address = self.all(RouteAdded, lambda route: route.engine == name)[-1].address
        async with (
            aiohttp.ClientSession() as http,
            http.post(address + "/stub/knobs", json=changes) as answer,
        ):
            assert answer.status == 200, await answer.text()


@asynccontextmanager
async def job(url: str, *files: NodeFile, **settings: Any) -> AsyncIterator[Watch]:
    """Orchestrator and agents, until every engine serves its base model; all of it ended behind the block."""

    async def orchestrate() -> None:
        await service.serve(
            bus_url=url, jobs=[JOB], settings=SettingsFile(Settings(backoff_s=0, **settings), {})
        )

    async with open_bus(url) as bus, anyio.create_task_group() as tasks:
        watch = Watch(bus.job(JOB))
        tasks.start_soon(watch.run)
        tasks.start_soon(orchestrate)
        async with _agents(url, list(files)):
            for file in files:
                for engine in file.engines:
                    await watch.until(RouteAdded, lambda route, name=engine.name: route.engine == name)
            yield watch
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _agents(url: str, files: list[NodeFile]) -> AsyncIterator[None]:
    if not files:
        yield
        return
    with swept(files[0]):
        async with running(files[0], url), _agents(url, files[1:]):
            yield


def arrays(folder: Path, *, seed: int) -> dict[str, Any]:
    """Weights for a stub engine, decided by `seed`."""
    tensors: dict[str, Any] = load_file(write_model(folder, seed=seed) / "model.safetensors")
    return tensors


Call = Callable[[Callable[[Any], Any]], "asyncio.Future[Any]"]


@asynccontextmanager
async def training(url: str, **session: Any) -> AsyncIterator[Call]:
    """A trainer's session in one thread of its own: `await call(lambda trainer: …)` runs there.

    A call begins at once, and ends before the next one begins.
    """
    with ThreadPoolExecutor(1) as thread:

        def run(do: Callable[[], Any]) -> "asyncio.Future[Any]":
            return asyncio.wrap_future(thread.submit(do))

        scope = relight.trainer(url, job=JOB, **session)
        trainer = await run(scope.__enter__)
        try:
            yield lambda do: run(lambda: do(trainer))
        finally:
            with anyio.CancelScope(shield=True):
                await run(lambda: scope.__exit__(None, None, None))
