"""Weights: what is loaded is what was handed over, and nothing is routed on a label alone."""

import json
import shutil
from pathlib import Path

import aiohttp
import msgspec
import pytest

from relight.events.bus.embedded import Embedded
from relight.events.decisions import ReportRequested
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    NodeUp,
    WeightsFailed,
    WeightsLoaded,
)
from relight.events.ids import JobName
from relight.events.values import Canary, Weights
from relight.events.version import BASE, Version
from tests.conftest import write_model
from tests.node_support import (
    NODE,
    Player,
    directing,
    engine,
    kill,
    knobs,
    node_file,
    post,
    record,
    role,
    write_snapshot,
)

pytestmark = pytest.mark.anyio
V1, V2 = Version(7, 1), Version(7, 2)


async def _is_paused(started: EngineStarted) -> bool:
    async with aiohttp.ClientSession() as http, http.get(started.address + "/is_paused") as response:
        return bool((await response.json())["is_paused"])


async def _serving(player: Player) -> tuple[EngineStarted, Healthy]:
    started = await player.ask(EngineStarted, player.start())
    assert await _is_paused(started)
    return started, await player.ask(Healthy, player.verify(BASE))


async def test_a_paused_engine_loads_is_proven_and_resumes(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        loaded = await player.ask(WeightsLoaded, player.load(V1, uri, digest))
        assert (loaded.version, loaded.digest) == (V1, digest)
        assert await _is_paused(started)
        first = await player.ask(Healthy, player.verify(V1, digest=digest))
        assert not await _is_paused(started)
        again = await player.ask(Healthy, player.verify(V1, digest=digest, reference=first.canary))
        assert again.canary == first.canary
        twice = await player.ask(WeightsLoaded, player.load(V1, uri, digest))
        assert twice.version == V1


async def test_a_serving_engine_loads_and_goes_on_serving(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started, base = await _serving(player)
        await player.ask(WeightsLoaded, player.load(V1, uri, digest))
        assert not await _is_paused(started)
        probed = await player.ask(Healthy, player.probe())
        assert probed.version == V1
        assert probed.canary is not None and base.canary is not None
        assert probed.canary.logprobs != base.canary.logprobs


async def test_checksums_that_were_slow_once_are_looked_at_again_once_they_are_not(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    learned = file.state_path / "engines" / "e0" / "model.json"
    async with directing(file, server.url) as player:
        await _serving(player)
        slow = {**json.loads(learned.read_text()), "checksums_s": 1e6}
        learned.write_text(json.dumps(slow))
        await player.ask(Healthy, player.verify(BASE))
        assert json.loads(learned.read_text())["checksums_s"] < 1e6


async def test_bytes_that_are_not_those_of_the_digest_touch_nothing(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    weights = tmp_path / "w1/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started, _ = await _serving(player)
        failed = await player.ask(WeightsFailed, player.load(V1, uri, digest))
        assert not failed.touched and "model.safetensors" in failed.error
        failed = await player.ask(WeightsFailed, player.load(V1, str(tmp_path / "absent"), digest))
        assert not failed.touched and "absent" in failed.error
        assert not await _is_paused(started)


async def test_a_load_never_goes_back(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        await player.ask(EngineStarted, player.start())
        await player.ask(WeightsLoaded, player.load(V2, *write_snapshot(tmp_path / "w2", V2, seed=2)))
        failed = await player.ask(
            WeightsFailed, player.load(V1, *write_snapshot(tmp_path / "w1", V1, seed=1))
        )
        assert not failed.touched and "7.2" in failed.error


async def test_tensors_that_the_engine_does_not_know_touch_nothing(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    from relight.agents import snapshot

    folder = tmp_path / "w1"
    write_snapshot(folder, V1, seed=1)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    (folder / snapshot.MANIFEST).unlink()
    manifest = snapshot.describe(folder, V1)
    (folder / snapshot.MANIFEST).write_bytes(snapshot.encoded(manifest))
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        await player.ask(EngineStarted, player.start())
        order = player.load(V1, str(folder), snapshot.digest_of(manifest))
        failed = await player.ask(WeightsFailed, order)
        assert not failed.touched and "lm_head.weight" in failed.error
        (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
        (folder / snapshot.MANIFEST).unlink()
        manifest = snapshot.describe(folder, V1)
        (folder / snapshot.MANIFEST).write_bytes(snapshot.encoded(manifest))
        await player.ask(WeightsLoaded, player.load(V1, str(folder), snapshot.digest_of(manifest)))


@pytest.mark.parametrize("fault", ["fail", "poison"])
async def test_a_refused_load_is_touched(
    server: Embedded, tmp_path: Path, stub_model: Path, fault: str
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await knobs(started, reload=fault)
        failed = await player.ask(WeightsFailed, player.load(V1, uri, digest))
        assert failed.touched and "500" in failed.error


async def test_a_load_that_hangs_ends_at_its_deadline_and_the_engine_is_not_called_dead(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    file = node_file(tmp_path / "state", engine(stub_model, stall_s=0.5))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await knobs(started, reload="hang")
        failed = await player.ask(WeightsFailed, player.load(V1, uri, digest, seconds=4))
        assert failed.touched and "deadline" in failed.error
        assert not player.seen(EngineDead)


async def test_an_engine_in_the_middle_of_a_load_is_reported_at_no_version(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        started, _ = await _serving(player)
        await knobs(started, reload="hang")
        await player.decide(player.load(V1, uri, digest))
        while record(file).load is None:
            await player.job.pulses()
        asked = ReportRequested(**player.head(), node=NODE, deadline=player.deadline())
        up = await player.ask(NodeUp, asked)
        assert [(each.state, each.version) for each in up.engines] == [("paused", None)]


async def test_an_engine_that_sleeps_is_not_loaded_into(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await post(started, "/sleep?level=1")
        failed = await player.ask(WeightsFailed, player.load(V1, uri, digest))
        assert not failed.touched and "sleeps" in failed.error


async def test_a_death_ends_a_load_at_once(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await knobs(started, reload="hang")
        await player.decide(player.load(V1, uri, digest))
        while record(file).load is None:
            await player.job.pulses()
        kill(role(file, "core"))
        await player.wait(EngineDead)
        stopped = await player.ask(EngineStopped, player.stop(), within_s=3)
        assert stopped.proof.took_ms < 1000
        assert not player.seen(WeightsFailed)


async def test_a_lying_label_is_no_proof(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        failed = await player.ask(WeightsFailed, player.verify(V1, digest=digest))
        assert failed.touched and "'default'" in failed.error
        await player.ask(WeightsLoaded, player.load(V1, uri, digest))
        await knobs(started, lying_version="7.0")
        failed = await player.ask(WeightsFailed, player.verify(V1, digest=digest))
        assert "'7.0'" in failed.error
        assert await _is_paused(started)


async def test_a_probe_tells_the_label_that_a_push_has_moved(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started, healthy = await _serving(player)
        assert healthy.version == BASE
        await knobs(started, lying_version="7.5")
        assert (await player.ask(Healthy, player.probe())).version == Version(7, 5)


async def test_a_canary_that_differs_from_the_reference_pauses_the_engine_again(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started, healthy = await _serving(player)
        reference = healthy.canary
        assert reference is not None
        await knobs(started, logprob_shift_after_resume=0.25)
        failed = await player.ask(WeightsFailed, player.verify(BASE, reference=reference, tolerance=0.1))
        assert failed.touched and "canary" in failed.error
        assert await _is_paused(started)
        other = Canary(tokens=(1, 2), logprobs=(-1.0,))
        failed = await player.ask(WeightsFailed, player.verify(BASE, reference=other, tolerance=0.1))
        assert "another sequence" in failed.error


async def test_old_keys_and_values_are_forgotten_before_the_canary(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    file = node_file(tmp_path / "state", engine(stub_model, "--prefix-cache", "on"))
    async with directing(file, server.url) as player:
        _, base = await _serving(player)
        await player.ask(WeightsLoaded, player.load(V1, uri, digest))
        healthy = await player.ask(Healthy, player.verify(V1))
        assert healthy.canary is not None and base.canary is not None
        assert healthy.canary.logprobs != base.canary.logprobs


async def test_hashes_of_nothing_prove_nothing(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--empty-checksums"))
    async with directing(file, server.url) as player:
        _, healthy = await _serving(player)
        assert healthy.canary is not None and healthy.canary.checksums is None


@pytest.mark.parametrize("empty", [False, True])
async def test_a_first_load_that_changes_nothing_is_told_by_what_the_engine_computed_at_its_start(
    server: Embedded, tmp_path: Path, stub_model: Path, empty: bool
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    flags = ("--empty-checksums", *(("--load-format", "dummy") if empty else ()))
    file = node_file(tmp_path / "state", engine(stub_model, *flags))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await knobs(started, reload="nothing")
        await player.ask(WeightsLoaded, player.load(V1, uri, digest))
        failed = await player.ask(WeightsFailed, player.verify(V1, digest=digest))
        what = "the random weights it was started with" if empty else f"the weights in {stub_model}"
        assert failed.error == f"it computes exactly what it computed with {what}"


async def test_weights_that_change_nothing_and_are_no_others_are_unproven_and_no_lie(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """The trainer is at the base weights still; pushed ones lie in no folder that could be compared."""
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=0)
    file = node_file(tmp_path / "state", engine(stub_model, "--empty-checksums"))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(WeightsLoaded, player.load(V1, uri, digest))
        told = await player.ask(Healthy, player.verify(V1, digest=digest))
        assert told.unproven is not None and not told.moved
        again = await player.ask(Healthy, player.verify(V1, digest=digest))
        assert again.unproven is not None and again.moved, "it is compared with itself"
        await post(started, "/update_weight_version", {"new_version": str(V2)})
        pushed = await player.ask(Healthy, player.verify(V2))
        assert pushed.unproven is not None and not pushed.moved


async def test_an_engine_is_started_on_a_snapshot(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    plain = engine(stub_model)
    command = tuple("{weights}" if word == str(stub_model) else word for word in plain.command)
    ours = msgspec.structs.replace(plain, command=command, model=str(stub_model))
    weights = Weights(version=V1, uri=f"file://{uri}", digest=digest)
    async with directing(node_file(tmp_path / "state", ours), server.url) as player:
        started = await player.ask(EngineStarted, player.start(weights=weights))
        assert started.weights == V1
        await player.ask(Healthy, player.verify(V1, digest=digest))
        await player.ask(EngineStopped, player.stop())
        assert (await player.ask(EngineStarted, player.start(2))).weights is None
        await player.ask(EngineStopped, player.stop(2))
        shutil.copy(stub_model / "model.safetensors", tmp_path / "w1/model.safetensors")
        from relight.events.facts import StartFailed

        failed = await player.ask(StartFailed, player.start(3, weights=weights))
        assert failed.cause == "weights"


async def test_a_reload_is_tried_once_for_a_model_and_again_when_that_changes(
    server: Embedded, tmp_path: Path
) -> None:
    base = write_model(tmp_path / "base", seed=0)
    file = node_file(tmp_path / "state", engine(base))

    def reloads(incarnation: int) -> int:
        log = file.state_path / "engines" / "e0" / str(incarnation) / "log"
        return sum("POST /collective_rpc" in line for line in log.read_text().splitlines())

    async with directing(file, server.url) as player:
        for incarnation in (1, 2, 3):
            started = await player.ask(EngineStarted, player.start(incarnation))
            assert started.reloads is True
            await player.ask(EngineStopped, player.stop(incarnation))
            if incarnation == 2:
                write_model(base, seed=1)
        assert [reloads(incarnation) for incarnation in (1, 2, 3)] == [1, 0, 1]


async def test_an_engine_that_cannot_reload_says_so_and_is_never_asked_to(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    file = node_file(tmp_path / "state", engine(stub_model, "--reload", "fail"))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        assert started.reloads is False
        failed = await player.ask(WeightsFailed, player.load(V1, uri, digest))
        assert not failed.touched and "only started on weights" in failed.error
        asked = ReportRequested(**player.head(), node=NODE, deadline=player.deadline())
        up = await player.ask(NodeUp, asked)
        assert [report.reloads for report in up.engines] == [False]
        await player.ask(Healthy, player.verify(BASE))


async def test_an_engine_that_is_spoilt_by_the_trial_is_started_once_more(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--reload", "spoil"))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        assert (started.incarnation, started.reloads) == (1, False)
        spoilt = await player.ask(Healthy, player.verify(BASE))
    plain = node_file(tmp_path / "other", engine(stub_model), job=JobName("job-2"))
    async with directing(plain, server.url) as player:
        await player.ask(EngineStarted, player.start())
        right = await player.ask(Healthy, player.verify(BASE))
    assert spoilt.canary == right.canary
