"""`relight.engine` on a real job: an orchestrator, an agent and a stub engine, each as it is run."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import relight
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable, UsageError
from relight.events.ids import EngineName
from relight.events.schema import EngineState
from relight.events.values import Phase, Process
from tests.node_support import JOB, alive, engine, generating, knobs, node_file, running, swept

pytestmark = pytest.mark.anyio
E0 = EngineName("e0")
WITHIN_S = 20.0


@contextmanager
def orchestrator(url: str, folder: Path) -> Iterator[None]:
    config = folder / "orchestrator.toml"
    config.write_text("[defaults]\nfloor = 0\ndrain_s = 5.0\nbackoff_s = 0.1\n")
    command = [sys.executable, "-m", "relight.orchestrator.cli", "orchestrate", "--bus", url, "--job", JOB]
    process = subprocess.Popen([*command, "--config", str(config)], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


async def _until(job: JobBus, phase: Phase) -> EngineState:
    with anyio.fail_after(WITHIN_S):
        while True:
            state = (await job.snapshot()).engines.get(E0)
            if state is not None and state.phase is phase:
                return state
            await anyio.sleep(0.05)


@asynccontextmanager
async def job_of(
    server: Embedded, tmp_path: Path, model: Path, *flags: str, **changes: Any
) -> AsyncIterator[tuple[JobBus, EngineState]]:
    """A job whose only engine serves."""
    file = node_file(tmp_path / "state", engine(model, *flags, **changes))
    with swept(file), orchestrator(server.url, tmp_path):
        async with open_bus(server.url) as bus, running(file, server.url):
            job = bus.job(JOB)
            yield job, await _until(job, Phase.SERVING)


async def test_an_engine_is_looked_at_restarted_and_shut_down_by_the_rules(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with job_of(server, tmp_path, stub_model, "--max-model-len", "4096") as (job, state):
        handle = relight.engine(server.url, job=JOB, name="e0")
        health = await handle.check_health(timeout_s=5)
        assert health.ok and health.incarnation == 1 and health.took_ms is not None
        started: Any = msgspec.structs.replace(state)  # has the address that `generating` posts to
        async with generating(started, tokens=4000):
            with anyio.fail_after(WITHIN_S):
                seen = await handle.snapshot(timeout_s=5)
                while seen.scheduler.running != 1:
                    seen = await handle.snapshot(timeout_s=5)
            assert seen.routed and seen.label == "0.0" and str(seen.version) == "0.0"
            assert seen.scheduler.in_flight == 1 and seen.scheduler.paused is False
            assert seen.kv_cache.used == 1 / 256 and seen.scheduler.preemptions is None
            assert "preemptions: /metrics does not tell vllm:num_preemptions_total" in seen.missing
            await knobs(started, no_metrics=True)
            blind = await handle.snapshot(timeout_s=5)
            assert blind.scheduler.running is None and blind.scheduler.in_flight == 1
            assert "metrics: GET /metrics: 404" in blind.missing
            await knobs(started, no_metrics=False)
        assert await handle.restart(timeout_s=WITHIN_S) == 2
        assert not any(map(alive, state.processes))
        assert (await handle.check_health(timeout_s=5)).ok
        await handle.shutdown(timeout_s=WITHIN_S)
        assert (await job.snapshot()).engines[E0].phase is Phase.STOPPED
        assert (await handle.check_health(timeout_s=5)).state == "absent"
        await handle.shutdown(timeout_s=5)
        with pytest.raises(UsageError, match="relight release e0"):
            await handle.restart(timeout_s=5)


async def test_what_is_ill_is_told_apart_and_a_wish_outlives_its_time_out(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with job_of(server, tmp_path, stub_model, stall_s=60.0, grace_s=3.0) as (job, state):
        handle = relight.engine(server.url, job=JOB, name="e0")
        started: Any = state
        await knobs(started, slow_start_s=0.0, freeze_after_tokens=0)
        health = await handle.check_health(timeout_s=1)
        assert (health.state, health.ok) == ("silent", False)
        seen = await handle.snapshot(timeout_s=2)
        assert seen.state == "silent" and seen.scheduler.running == 0
        assert seen.scheduler.paused is None and any("paused, asleep, label" in each for each in seen.missing)
        with pytest.raises(relight.NotYet, match="the wish stands"):
            await handle.restart(timeout_s=1.0)
        with anyio.fail_after(WITHIN_S):
            while (await job.snapshot()).engines[E0].incarnation != 2:
                await anyio.sleep(0.05)
        await _until(job, Phase.SERVING)


async def test_another_machines_loopback_is_not_called(server: Embedded, stub_model: Path) -> None:
    from tests.node_support import playing

    elsewhere = EngineState(
        phase=Phase.SERVING,
        node="node-z",  # type: ignore[arg-type]
        incarnation=3,
        address="http://127.0.0.1:1",
        processes=(Process(4_000_000, 1),),
    )
    async with playing(server.url) as player:
        await player.decide(e0=elsewhere, e1=msgspec.structs.replace(elsewhere, processes=()))
        handle = relight.engine(server.url, job=JOB, name="e0")
        health = await handle.check_health(timeout_s=5)
        assert health.state == "unreachable" and "loopback of node node-z" in health.detail
        seen = await handle.snapshot(timeout_s=5)
        assert (
            seen.state == "unreachable" and seen.scheduler.running is None and "everything" in seen.missing[0]
        )
        refused = await relight.engine(server.url, job=JOB, name="e1").check_health(timeout_s=5)
        assert refused.state == "unreachable"


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), True, "5", None])
async def test_only_finite_positive_time_outs_are_taken(timeout_s: Any) -> None:
    handle = relight.engine("redis://127.0.0.1:1", job="job-1", name="e0")
    for call in (handle.check_health, handle.snapshot, handle.shutdown, handle.restart):
        with pytest.raises(UsageError, match="timeout_s"):
            await call(timeout_s=timeout_s)


async def test_an_engine_that_is_none_and_a_bus_that_is_away_are_told(
    server: Embedded, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="job-1 has no engine 'e9'"):
        await relight.engine(server.url, job="job-1", name="e9").check_health(timeout_s=5)
    with pytest.raises(BusUnavailable):
        await relight.engine(f"redis://127.0.0.1:{free_port}", job="job-1", name="e0").snapshot(timeout_s=5)
    monkeypatch.delenv("RELIGHT_BUS_URL", raising=False)
    with pytest.raises(UsageError, match="RELIGHT_BUS_URL"):
        relight.engine(job="job-1", name="e0")


def test_counters_of_vllm_are_read_as_it_writes_them() -> None:
    from relight.agents.adapters.vllm import total

    told = (
        b"# HELP vllm:kv_cache_usage_perc share\n# TYPE vllm:kv_cache_usage_perc gauge\n"
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        b'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5\n'
        b'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 32.0\n'
        b'vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09\n'
        b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        b'vllm:num_requests_waiting{engine="1",model_name="m"} 2.0\n'
    )
    assert total(told, "kv_cache_usage_perc") == 0.5
    assert total(told, "prefix_cache_hits_total") == 32.0
    assert total(told, "num_requests_waiting") == 3.0
    assert total(told, "num_preemptions_total") is None
