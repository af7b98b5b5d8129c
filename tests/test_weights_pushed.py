"""Weights that are pushed: an engine that says that it took them, and did not, is found by what it computes.

All of it through real agents, a real orchestrator and a real trainer's session; the stub lies by a knob.
"""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relight.agents.trainer.transfer import VllmTransferSync
from relight.events.bus.embedded import Embedded
from relight.events.decisions import Alarm, ProbeEngine, RouteAdded, RouteFenced, StopEngine
from relight.events.ids import EngineName
from tests.node_support import engine, node_file
from tests.orchestrator_support import until
from tests.test_transports import Folders, Trained
from tests.weights_rig import Call, Watch, job, training

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.anyio

E0, E1 = EngineName("e0"), EngineName("e1")


class Pushing:
    """A trainer that pushes to engines, another model each time."""

    def __init__(self, watch: Watch, call: Call, model: Trained) -> None:
        self.watch = watch
        self._call = call
        self._model = model

    async def sync(self, step: int, *, changed: bool = True) -> None:
        if changed:
            with torch.no_grad():
                for tensor in self._model.parameters():
                    tensor.add_(0.125)
        await self._call(lambda trainer: trainer.sync(step))

    async def looked_at(self, step: int) -> None:
        """What every engine computes at that step is known."""

        async def known() -> bool:
            engines = (await self.watch.job.snapshot()).engines.values()
            looks = [engine.unproven or engine.reference for engine in engines]
            return all(look and look.version.run > 0 and look.version.step == step for look in looks)

        await until(known, within_s=30.0)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """It waits for rollouts, and serves recoveries."""
        done = threading.Event()
        waits = self._call(lambda trainer: trainer.wait(done.wait))
        try:
            yield
        finally:
            done.set()
            await waits


@asynccontextmanager
async def pushing(url: str, tmp_path: Path, stub_model: Path, *names: EngineName) -> AsyncIterator[Pushing]:
    file = node_file(tmp_path / "state", *(engine(stub_model, name=name) for name in names))
    (tmp_path / "wire").mkdir()
    model = Trained(tmp_path / "trained")
    sync = VllmTransferSync(model, open_group=Folders(tmp_path / "wire"))
    async with job(url, file) as watch, training(url, sync=sync) as call:
        yield Pushing(watch, call, model)


@pytest.mark.parametrize("liar", [E0, E1])
async def test_one_that_takes_nothing_at_an_ordinary_push_is_told_by_its_peer(
    server: Embedded, tmp_path: Path, stub_model: Path, liar: EngineName
) -> None:
    async with pushing(server.url, tmp_path, stub_model, E0, E1) as trainer:
        watch = trainer.watch
        await trainer.sync(0)
        await trainer.sync(1)
        await trainer.looked_at(1)
        await watch.knobs(liar, transfer="nothing")
        await trainer.sync(2)
        alarm = await watch.until(Alarm, lambda alarm: alarm.kind == "weights")
        assert alarm.detail.startswith(f"{liar}.1 is not at ")
        async with trainer.waiting():
            await watch.routed(liar, 2, step=2)
        said = [each for each in watch.decided if isinstance(each, RouteAdded | RouteFenced)]
        of_it = [each for each in said if (each.engine, each.incarnation) == (liar, 1)]
        assert isinstance(of_it[-1], RouteFenced)
        assert {stop.engine for stop in watch.all(StopEngine)} == {liar}


async def test_one_that_takes_nothing_at_the_first_push_is_told_by_its_peer(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with pushing(server.url, tmp_path, stub_model, E0, E1) as trainer:
        watch = trainer.watch
        await watch.knobs(E1, transfer="nothing")
        await trainer.sync(0)
        alarm = await watch.until(Alarm, lambda alarm: alarm.kind == "weights")
        assert alarm.detail.startswith("e1.1 is not at ")
        async with trainer.waiting():
            await watch.routed(E1, 2, step=0)
        assert {stop.engine for stop in watch.all(StopEngine)} == {E1}


async def test_one_that_takes_nothing_and_is_alone_is_told_to_people(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with pushing(server.url, tmp_path, stub_model, E0) as trainer:
        watch = trainer.watch
        await trainer.sync(0)
        await trainer.sync(1)
        await trainer.looked_at(1)
        assert len(watch.all(Alarm)) == 1, "of the first push, which is measured by nothing"
        await watch.knobs(E0, transfer="nothing")
        await trainer.sync(2)
        alarm = await watch.until(Alarm, lambda alarm: "what it computed before" in alarm.detail)
        assert (alarm.kind, alarm.detail[:5]) == ("unproven", "e0.1 ")
        await watch.knobs(E0, transfer="load")
        await trainer.sync(3)
        await watch.routed(E0, 1, step=3)
        assert not watch.all(StopEngine)


async def test_a_push_that_changes_nothing_stops_nobody(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with pushing(server.url, tmp_path, stub_model, E0, E1) as trainer:
        watch = trainer.watch
        await trainer.sync(0)
        await trainer.sync(1)
        await trainer.looked_at(1)
        await trainer.sync(2, changed=False)
        for name in (E0, E1):
            await watch.until(
                Alarm,
                lambda alarm, name=name: (
                    alarm.detail.startswith(f"{name}.1 at") and "what it computed before" in alarm.detail
                ),
            )
        assert not watch.all(StopEngine)


async def test_no_boundary_waits_for_a_look(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    """The looks are asked for with the routes, and a boundary is released while they are under way."""
    async with pushing(server.url, tmp_path, stub_model, E0) as trainer:
        watch = trainer.watch
        await trainer.sync(0)
        await watch.knobs(E0, stream_fault="silent")  # no canary comes back
        await trainer.sync(1)
        await watch.until(ProbeEngine)
        await watch.routed(E0, 1, step=1)
