"""Engines that lie about their weights: never routed with them, stopped, restarted, and told to people.

All of it through a real agent, a real orchestrator and a real trainer's session; the stub lies by a knob.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relight.agents import snapshot
from relight.agents.node import content
from relight.agents.trainer.snapshot import SnapshotSync
from relight.events.bus.embedded import Embedded
from relight.events.decisions import Alarm, LoadWeights, RouteAdded, StartEngine, StopEngine
from relight.events.ids import EngineName
from relight.events.version import Version
from tests.node_support import engine, node_file, running, swept, write_snapshot
from tests.weights_rig import Watch, arrays, job, training

pytestmark = pytest.mark.anyio

E0 = EngineName("e0")
LIARS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"reload": "nothing"}, "is [0-9a-f]{64} in the engine and [0-9a-f]{64} in"),
    "half": ({"reload": "half"}, "is [0-9a-f]{64} in the engine and [0-9a-f]{64} in"),
    "wrong-file": ({"reload": "base"}, "is [0-9a-f]{64} in the engine and [0-9a-f]{64} in"),
    "old-cache": ({"prefix_cache": "sticky"}, "its prefix cache answers with keys and values of before"),
    "wrong-label": ({"lying_version": "0.0"}, r"its label is '0\.0', not"),
    "hashes-of-nothing": ({"reload": "nothing", "empty_checksums": True}, "is nothing in the engine and"),
    "refused": ({"reload": "poison"}, "500"),
}
"""What each engine lies about, and what is found."""


async def is_told(watch: Watch, name: EngineName, incarnation: int, what: str) -> None:
    begins = f"{name}.{incarnation} is not at"
    alarm = await watch.until(
        Alarm, lambda alarm: alarm.kind == "weights" and alarm.detail.startswith(begins)
    )
    assert re.search(what, alarm.detail), alarm.detail
    assert watch.all(StopEngine, lambda stop: (stop.engine, stop.incarnation) == (name, incarnation))


async def test_no_liar_is_ever_routed_with_what_it_says(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "CHEAP_S", 60.0)  # of so small a model, however busy this machine is
    names = [EngineName(name) for name in LIARS]
    file = node_file(
        tmp_path / "state", *(engine(stub_model, "--prefix-cache", "on", name=name) for name in names)
    )
    weights = arrays(tmp_path / "new", seed=1)
    sync = SnapshotSync(lambda: weights, tmp_path / "weights")
    async with job(server.url, file) as watch, training(server.url, sync=sync) as call:
        for name in names:
            await watch.knobs(name, **LIARS[name][0])
        await call(lambda trainer: trainer.sync(0))
        for name in names:
            await watch.routed(name, 2, step=0)
            await is_told(watch, name, 1, LIARS[name][1])
        # They serve now, and one lies at an ordinary sync, where nobody asks for its canary.
        liar = names[0]
        await watch.knobs(liar, **LIARS[liar][0])
        weights |= arrays(tmp_path / "newer", seed=2)
        await call(lambda trainer: trainer.sync(1))
        await watch.routed(liar, 3, step=1)
        await is_told(watch, liar, 2, LIARS[liar][1])
        for name in names[1:]:
            await watch.routed(name, 2, step=1)
    said = {(route.engine, route.incarnation, route.version) for route in watch.all(RouteAdded)}
    honest = {(name, 2) for name in names} | {(liar, 3)}
    assert {(name, number) for name, number, version in said if version.run} == honest
    assert (liar, 2, watch.all(RouteAdded)[-1].version) not in said
    assert not watch.all(Alarm, lambda alarm: alarm.kind in ("unproven", "reload"))


async def test_an_engine_whose_checksums_prove_nothing_is_found_by_what_it_computes(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--empty-checksums"))
    sync = SnapshotSync(arrays(tmp_path / "new", seed=1), tmp_path / "weights")
    async with job(server.url, file) as watch, training(server.url, sync=sync) as call:
        await watch.knobs(E0, reload="nothing")
        await call(lambda trainer: trainer.sync(0))
        await watch.routed(E0, 2, step=0)
        await is_told(watch, E0, 1, "it computes exactly what it computed with the weights in .*/base")
        alarm = await watch.until(Alarm, lambda alarm: alarm.kind == "unproven")
        assert alarm.detail.startswith("e0.2 at")


async def test_the_first_load_of_an_engine_that_starts_after_its_trainer_is_measured_by_its_start(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """It was never proven before, no checksum of it is real and it has no peer."""
    liar = engine(stub_model, "--empty-checksums", "--reload", "nothing")
    file = node_file(tmp_path / "state", liar)
    sync = SnapshotSync(arrays(tmp_path / "new", seed=1), tmp_path / "weights")
    async with job(server.url) as watch, training(server.url, sync=sync) as call:
        await call(lambda trainer: trainer.sync(3))
        with swept(file):
            async with running(file, server.url):
                waits = call(lambda trainer: trainer.sync(4))
                same = "it computes exactly what it computed with the weights in .*/base"
                for incarnation in (1, 2):
                    await is_told(watch, E0, incarnation, same)
        await waits
    assert not watch.all(RouteAdded)


async def test_a_truncated_shard_is_found_before_an_engine_is_touched(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    async with job(server.url, file) as watch, training(server.url) as call:
        run = await call(lambda trainer: trainer.run)
        uri, _ = write_snapshot(tmp_path / "w", Version(run, 0), seed=1)
        shard = Path(uri) / "model.safetensors"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-4])
        await call(lambda trainer: trainer.published(0, uri))
        await call(lambda trainer: trainer.wait(lambda: None))
        alarm = await watch.until(Alarm, lambda alarm: alarm.kind == "weights")
        assert re.search(r"e0 cannot take .*model\.safetensors: \d+ bytes, expected", alarm.detail)
        assert not watch.all(StopEngine)
        shard.write_bytes(whole)
        route = await watch.routed(E0, 1, step=0)
        assert route.version == Version(run, 0)


async def test_a_model_that_reloads_wrongly_is_found_at_its_first_start_and_only_started_on_weights(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """Checksums are right, what it computes is not: as vLLM does with tied embeddings and MoE on the CPU."""
    plain = engine(stub_model, "--reload", "spoil")
    command = tuple("{weights}" if word == str(stub_model) else word for word in plain.command)
    file = node_file(
        tmp_path / "state", msgspec.structs.replace(plain, command=command, model=str(stub_model))
    )
    weights = arrays(tmp_path / "new", seed=1)
    sync = SnapshotSync(lambda: weights, tmp_path / "weights")
    async with job(server.url, file, recover_at="boundary") as watch, training(server.url, sync=sync) as call:
        alarm = await watch.until(Alarm, lambda alarm: alarm.kind == "reload")
        assert "does not compute the same after a reload" in alarm.detail
        for step in (0, 1):
            weights |= arrays(tmp_path / str(step), seed=step + 1)
            await call(lambda trainer, step=step: trainer.sync(step))
            await watch.routed(E0, step + 2, step=step)
    assert not watch.all(LoadWeights)
    started = watch.all(StartEngine)
    assert [order.weights and order.weights.version.step for order in started] == [None, 0, 1]
    assert all(
        snapshot.read_manifest(Path(order.weights.uri)).version == order.weights.version
        for order in started
        if order.weights
    )
    assert len(watch.all(Alarm, lambda alarm: alarm.kind == "reload")) == 1
