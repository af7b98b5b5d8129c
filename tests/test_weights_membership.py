"""Engines that die at every moment of a sync, and trainers that do: the right outcome, and nobody hangs.

Real orchestrator, agent, stub processes and sessions; deaths are SIGKILLs of the core.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest

from relight.agents.node.config import NodeFile
from relight.agents.replay.client import ReplayClient
from relight.agents.trainer.snapshot import SnapshotSync
from relight.events.bus.embedded import Embedded
from relight.events.decisions import (
    Alarm,
    BoundaryReleased,
    LoadWeights,
    RecoveryFinished,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
    SyncWeights,
)
from relight.events.ids import EngineName
from relight.events.version import Version
from tests.node_support import JOB, engine, kill, node_file, record, role
from tests.weights_rig import Watch, arrays, job, training

pytestmark = pytest.mark.anyio

E0, E1, E2 = EngineName("e0"), EngineName("e1"), EngineName("e2")


@pytest.fixture
def file(tmp_path: Path, stub_model: Path) -> NodeFile:
    return node_file(
        tmp_path / "state", engine(stub_model), engine(stub_model, "--prefix-cache", "on", name="e1")
    )


def posts(file: NodeFile, name: EngineName, paths: Iterable[str]) -> int:
    """How often the engine's present incarnation was asked for one of these."""
    number = record(file, name).incarnation
    log = file.state_path / "engines" / name / str(number) / "log"
    return sum(any(f"POST {path}" in line for path in paths) for line in log.read_text().splitlines())


async def generating(watch: Watch, name: EngineName, until: threading.Event) -> str:
    """A client's call that runs for the whole of a recovery; how it ended."""
    address = watch.all(RouteAdded, lambda route: route.engine == name)[-1].address
    body = {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 400, "ignore_eos": True},
        "stream": False,
    }
    async with (
        aiohttp.ClientSession() as http,
        http.post(address + "/inference/v1/generate", json=body) as answer,
    ):
        until.set()
        return str((await answer.json())["choices"][0]["finish_reason"])


async def test_deaths_at_every_moment_of_a_trainers_loop(  # noqa: PLR0915 -- one loop after the other
    server: Embedded, tmp_path: Path, file: NodeFile
) -> None:
    weights = arrays(tmp_path / "0", seed=1)
    written: list[int] = []

    def model() -> dict[str, Any]:
        written.append(1)
        return weights

    sync = SnapshotSync(model, tmp_path / "weights")
    async with (
        job(server.url, file, recover_at="boundary", restarts=100) as watch,
        training(server.url, sync=sync) as call,
    ):
        await call(lambda trainer: trainer.sync(0))
        run = await call(lambda trainer: trainer.run)

        # One dies while the trainer waits for its rollouts: nobody else is asked for anything.
        ended = threading.Event()
        waiting = call(lambda trainer: trainer.wait(lambda: ended.wait(60)))
        others = posts(file, E1, ("/pause", "/abort_requests", "/collective_rpc", "/resume"))
        kill(role(file, "core", E0))
        again = await watch.routed(E0, 2, step=0)
        assert again.version == Version(run, 0)
        first = watch.all(RouteAdded, lambda route: route.engine == E0)[0]
        assert again.address != first.address, "it listens somewhere else"
        assert posts(file, E1, ("/pause", "/abort_requests", "/collective_rpc", "/resume")) == others
        assert [m.engine for m in watch.all(SyncWeights)[-1].members] == [E0]

        # Both die at once: no survivor, no optimizer step, the same version.
        kill(role(file, "core", E0))
        kill(role(file, "core", E1))
        await watch.routed(E0, 3, step=0)
        await watch.routed(E1, 2, step=0)

        # A second one dies while the first recovers.
        kill(role(file, "core", E0))
        await watch.until(StopEngine, lambda stop: (stop.engine, stop.incarnation) == (E0, 3))
        kill(role(file, "core", E1))
        await watch.routed(E0, 4, step=0)
        await watch.routed(E1, 3, step=0)
        ended.set()
        await waiting
        assert len(written) == 1, "the version stood"

        # One dies in the middle of a sync, which goes on with the other one.
        weights |= arrays(tmp_path / "1", seed=2)
        await watch.knobs(E1, reload="hang")
        syncing = call(lambda trainer: trainer.sync(1))
        await watch.until(LoadWeights, lambda load: load.engine == E1 and load.version == Version(run, 1))
        kill(role(file, "core", E1))
        await syncing
        await watch.routed(E0, 4, step=1)
        released = await watch.until(
            BoundaryReleased, lambda each: watch.all(SyncWeights)[-1].boundary == each.boundary
        )
        assert released.outcome == "done"

        # Its recovery and the next ordinary sync come together: one sync serves both.
        weights |= arrays(tmp_path / "2", seed=3)
        await call(lambda trainer: trainer.sync(2))
        await call(lambda trainer: trainer.wait(lambda: None))
        await watch.routed(E0, 4, step=2)
        # One dies between two syncs.
        kill(role(file, "core", E0))
        await watch.until(RouteFenced, lambda fence: (fence.engine, fence.incarnation) == (E0, 4))
        weights |= arrays(tmp_path / "3", seed=4)
        await call(lambda trainer: trainer.sync(3))
        ended.clear()
        waiting = call(lambda trainer: trainer.wait(lambda: ended.wait(60)))
        for name, number in ((E0, 5), (E1, 4)):
            assert (await watch.routed(name, number, step=3)).version == Version(run, 3)
        ended.set()
        await waiting
    _versions_never_go_back(watch)
    done = watch.all(RecoveryFinished, lambda each: each.outcome == "done")
    assert {(each.engine, each.recovery) for each in done} >= {(E0, done[0].recovery)}


def _versions_never_go_back(watch: Watch) -> None:
    """Of each engine's route, and of the samples that it can make."""
    for name in (E0, E1):
        versions = [route.version for route in watch.all(RouteAdded, lambda route, n=name: route.engine == n)]
        assert versions == sorted(versions)


async def test_of_three_engines_the_one_that_was_lost_serves_again_beside_the_others(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """Nothing here promotes or routes: turns of a client reach every present incarnation."""
    names = [E0, E1, E2]
    file = node_file(tmp_path / "state", *(engine(stub_model, name=name) for name in names))
    sync = SnapshotSync(arrays(tmp_path / "0", seed=1), tmp_path / "weights")
    async with (
        job(server.url, file) as watch,
        training(server.url, sync=sync) as call,
        ReplayClient(server.url, job=JOB) as client,
    ):
        await call(lambda trainer: trainer.sync(0))

        async def rollouts() -> list[int]:
            """Of each engine, how many calls its present incarnation has been sent for this."""
            before = [posts(file, name, ["/inference/v1/generate"]) for name in names]
            async with anyio.create_task_group() as tasks:
                for _ in range(12):
                    tasks.start_soon(client.generate, [1, 2, 3], {"max_tokens": 32, "ignore_eos": True})
            after = [posts(file, name, ["/inference/v1/generate"]) for name in names]
            return [now - then for now, then in zip(after, before, strict=True)]

        assert await rollouts() == [4, 4, 4]
        await call(lambda trainer: trainer.wait(lambda: kill(role(file, "core", E1))))
        await watch.routed(E1, 2, step=0)
        assert await rollouts() == [4, 4, 4]
        assert [record(file, name).incarnation for name in names] == [1, 2, 1]


async def test_a_survivors_generation_is_neither_aborted_nor_held(
    server: Embedded, tmp_path: Path, file: NodeFile
) -> None:
    sync = SnapshotSync(arrays(tmp_path / "0", seed=1), tmp_path / "weights")
    async with (
        job(server.url, file, recover_at="boundary") as watch,
        training(server.url, sync=sync) as call,
    ):
        await call(lambda trainer: trainer.sync(0))
        ended, started = threading.Event(), threading.Event()
        waiting = call(lambda trainer: trainer.wait(lambda: ended.wait(60)))
        ends: list[str] = []

        async def client() -> None:
            ends.append(await generating(watch, E1, started))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client)
            kill(role(file, "core", E0))
            await watch.routed(E0, 2, step=0)
        ended.set()
        await waiting
    assert ends == ["length"]


async def test_between_two_steps_a_recovery_takes_the_snapshot_or_waits_and_says_so(
    server: Embedded, tmp_path: Path, file: NodeFile
) -> None:
    sync = SnapshotSync(arrays(tmp_path / "0", seed=1), tmp_path / "weights")
    async with (
        job(server.url, file, recover_at="boundary", waiting_s=0.2) as watch,
        training(server.url, sync=sync) as call,
    ):
        await call(lambda trainer: trainer.sync(0))
        kill(role(file, "core", E0))
        await watch.until(StartEngine, lambda start: (start.engine, start.incarnation) == (E0, 2))
        alarm = await watch.until(Alarm, lambda alarm: alarm.kind == "waiting" and "e0" in alarm.detail)
        assert "boundary" in alarm.detail
        assert not watch.all(RouteAdded, lambda route: (route.engine, route.incarnation) == (E0, 2))
        await call(lambda trainer: trainer.wait(lambda: None))
        ended = threading.Event()
        waiting = call(lambda trainer: trainer.wait(lambda: ended.wait(60)))
        await watch.routed(E0, 2, step=0)
        ended.set()
        await waiting


TRAINER = """
import sys, time
import relight
from tests.weights_rig import arrays
from pathlib import Path
url, folder, moment = sys.argv[1:]
weights = arrays(Path(folder) / "killed", seed=5)

def model():
    if moment == "export":
        print("exporting", flush=True)
        time.sleep(600)
    return weights

with relight.trainer(url, job="job-1", sync=relight.SnapshotSync(model, Path(folder) / "weights")) as trainer:
    trainer.sync(7)
    trainer.wait(lambda: print("waiting", flush=True) or time.sleep(600))
"""


@pytest.mark.parametrize("moment", ["boundary", "export"])
async def test_a_trainer_that_is_killed_is_voided_by_its_silence_and_another_one_takes_over(
    server: Embedded, tmp_path: Path, file: NodeFile, moment: str
) -> None:
    async with job(server.url, file, trainer_silence_s=3.0) as watch:
        command = [sys.executable, "-c", TRAINER, server.url, str(tmp_path), moment]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None
            assert await anyio.to_thread.run_sync(killed.stdout.readline)
            killed.send_signal(signal.SIGKILL)
        await watch.until(Alarm, lambda alarm: alarm.kind == "trainer")
        snapshot = await watch.job.snapshot()
        assert snapshot.meta is not None and snapshot.meta.sync is None and snapshot.meta.boundary is None
        old = snapshot.meta.run
        sync = SnapshotSync(arrays(tmp_path / "next", seed=6), tmp_path / "weights")
        async with training(server.url, sync=sync) as call:
            run = await call(lambda trainer: trainer.run)
            assert run > old
            await call(lambda trainer: trainer.sync(2))  # its checkpoint was older than what it had synced
            for name in (E0, E1):
                route = await watch.until(
                    RouteAdded, lambda each, n=name: each.engine == n and each.version.run == run
                )
                assert route.version == Version(run, 2) > Version(old, 7)
        assert not watch.all(StopEngine), "weights that are pulled touch nobody"
        assert not list((tmp_path / "weights").glob("*.partial"))
    _versions_never_go_back(watch)
    assert JOB == "job-1"


async def test_a_pause_that_nobody_ends_makes_the_engine_stale_and_it_is_taken_up_again(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, stall_s=1.0))
    sync = SnapshotSync(arrays(tmp_path / "0", seed=1), tmp_path / "weights")
    async with job(server.url, file) as watch, training(server.url, sync=sync) as call:
        await call(lambda trainer: trainer.sync(0))
        await watch.routed(E0, 1, step=0)
        address = watch.all(RouteAdded)[-1].address
        routes = len(watch.all(RouteAdded))
        async with aiohttp.ClientSession() as http, http.post(address + "/pause?mode=keep") as answer:
            assert answer.status == 200
        await watch.until(
            RouteFenced, lambda fence: fence.cause is not None and "PauseExpired" in fence.reason
        )
        await watch.until(RouteAdded, lambda _: len(watch.all(RouteAdded)) > routes)
        async with aiohttp.ClientSession() as http, http.get(address + "/is_paused") as answer:
            assert (await answer.json())["is_paused"] is False
