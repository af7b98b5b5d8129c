"""A trainer's session on a real bus, with an orchestrator that follows a script."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import redis

import relight
from relight.agents.snapshot import SnapshotError, check
from relight.agents.trainer import places
from relight.agents.trainer.callback import CallbackSync
from relight.agents.trainer.session import OrchestratorLost, Superseded
from relight.agents.trainer.snapshot import SnapshotSync
from relight.agents.trainer.sync import Left
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.decisions import Decision, RouteAdded, RouteFenced, SyncWeights
from relight.events.errors import BusUnavailable, Fenced, UsageError
from relight.events.facts import Fact, JobFinished, SafeBoundary, WeightsPublished, WeightsSynced
from relight.events.ids import BootId, EngineName, JobName, trainer_source
from relight.events.values import Failed, Loaded, Member
from relight.events.version import Version
from tests.trainer_script import Script, deaf

E0 = Member(EngineName("e0"), 1, "http://127.0.0.1:8001")
E1 = Member(EngineName("e1"), 1, "http://127.0.0.1:8002")


def arrays() -> dict[str, Any]:
    return {"w": np.arange(8, dtype=np.float32)}


def is_open(fact: SafeBoundary) -> bool:
    return fact.state == "open"


def test_a_run_from_its_first_sync_to_its_end(server: Embedded, tmp_path: Path) -> None:
    with (
        Script(server.url, members=[E0]) as script,
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        trainer.sync(3)
        assert trainer.wait(lambda: "batch") == "batch"
        run = trainer.run
    version = Version(run, 3)
    seen = [
        (fact.state, fact.boundary, fact.step, fact.version, fact.exports, fact.sync)
        for fact in script.all(SafeBoundary)
    ]
    assert seen == [
        ("open", 1, 3, version, version, "all"),
        ("closed", 1, 3, version, None, "all"),
        ("open", 2, 3, version, version, "stale"),
        ("closed", 2, 3, version, None, "stale"),
    ]
    (published,) = script.all(WeightsPublished)
    assert published.version == version
    assert check(Path(published.uri), published.digest).version == version
    assert script.all(JobFinished) == [JobFinished(run=run)]


def test_a_recovery_while_the_trainer_waits_needs_no_step_and_writes_nothing(
    server: Embedded, tmp_path: Path
) -> None:
    written = 0

    def model() -> dict[str, Any]:
        nonlocal written
        written += 1
        return arrays()

    with (
        Script(server.url) as script,
        relight.trainer(server.url, job="j", sync=SnapshotSync(model, tmp_path)) as trainer,
    ):
        trainer.sync(0)

        def rollout() -> float:
            here = script.until(SafeBoundary, lambda fact: is_open(fact) and fact.sync == "stale")
            order = script.order(here, members=[E0])
            began = time.perf_counter()
            script.decide(order)
            answer = script.until(WeightsPublished, lambda fact: fact.sync == order.sync)
            assert answer.version == here.exports
            return time.perf_counter() - began

        assert trainer.wait(rollout) < 0.5  # a few milliseconds on a free machine
        assert written == 1


def test_exports_run_in_the_callers_thread_and_the_function_elsewhere(server: Embedded) -> None:
    threads: dict[str, int] = {}

    def push(version: Version, members: tuple[Member, ...], left: Left) -> None:
        threads["push"] = threading.get_ident()

    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("the caller's")
    with (
        Script(server.url) as script,
        relight.trainer(server.url, job="j", sync=CallbackSync(push, idempotent=True)) as trainer,
    ):
        trainer.sync(0)

        def rollout() -> str:
            threads["rollout"] = threading.get_ident()
            here = script.until(SafeBoundary, lambda fact: is_open(fact) and fact.sync == "stale")
            script.decide(script.order(here, members=[E0]))
            script.until(WeightsSynced, lambda fact: bool(fact.loaded))
            return variable.get()

        assert trainer.wait(rollout) == "the caller's"
    assert threads["push"] == threading.get_ident() != threads["rollout"]


def test_an_async_function_runs_in_one_lasting_loop(server: Embedded, tmp_path: Path) -> None:
    async def rollout() -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    with relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer:
        loops = {trainer.wait(rollout), trainer.wait(lambda: rollout()), trainer.wait(rollout)}  # noqa: PLW0108
        assert len(loops) == 1


def test_a_session_needs_no_main_thread(server: Embedded, tmp_path: Path) -> None:
    """As in a Ray actor, or a worker of any framework that keeps the main thread to itself."""
    came: list[object] = []

    def actor() -> None:
        with relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer:
            trainer.sync(0)

            async def rollout() -> None:
                here = await asyncio.to_thread(
                    script.until, SafeBoundary, lambda fact: is_open(fact) and fact.sync == "stale"
                )
                order = script.order(here, members=[E0])
                await asyncio.to_thread(script.decide, order)
                answered = await asyncio.to_thread(
                    script.until, WeightsPublished, lambda fact: fact.sync == order.sync
                )
                came.append(answered.version)

            trainer.wait(rollout)
            with trainer.boundary(0):
                pass
            came.append(Version(trainer.run, 0))

    with Script(server.url) as script:
        thread = threading.Thread(target=actor)
        thread.start()
        thread.join(30)
    assert len(came) == 2 and came[0] == came[1]


def test_what_the_function_raises_goes_through_and_the_boundary_is_closed(
    server: Embedded, tmp_path: Path
) -> None:
    async def broken() -> None:
        raise LookupError("async")

    def plain() -> None:
        raise LookupError("plain")

    with (
        Script(server.url) as script,
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        with pytest.raises(LookupError, match="plain"):
            trainer.wait(plain)
        with pytest.raises(LookupError, match="async"):
            trainer.wait(broken)
        script.until(SafeBoundary, lambda fact: (fact.boundary, fact.state) == (2, "closed"))


def test_an_interrupt_cancels_the_coroutine_and_closes(server: Embedded) -> None:
    ended = threading.Event()

    def interrupted(version: Version, members: tuple[Member, ...], left: Left) -> None:
        if members == (E1,):
            raise KeyboardInterrupt

    with Script(server.url, members=[E0]) as script:
        with (
            pytest.raises(KeyboardInterrupt),
            relight.trainer(server.url, job="j", sync=CallbackSync(interrupted, idempotent=True)) as trainer,
        ):
            trainer.sync(0)

            async def rollout() -> None:
                try:
                    here = await asyncio.to_thread(
                        script.until, SafeBoundary, lambda fact: is_open(fact) and fact.sync == "stale"
                    )
                    await asyncio.to_thread(script.decide, script.order(here, members=[E1]))
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            trainer.wait(rollout)
        assert ended.is_set()
        closed = script.until(SafeBoundary, lambda fact: (fact.boundary, fact.state) == (2, "closed"))
        assert closed.cut_off is not None
    assert not script.all(JobFinished)


def test_an_exception_ends_the_run_without_a_finish(server: Embedded, tmp_path: Path) -> None:
    with (
        Script(server.url) as script,
        pytest.raises(ZeroDivisionError),
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        trainer.sync(0)
        raise ZeroDivisionError
    assert script.here is not None
    assert not script.all(JobFinished)


def test_an_order_that_cannot_be_done_is_answered(server: Embedded, tmp_path: Path) -> None:
    with (
        Script(server.url) as script,
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        trainer.sync(0)

        def rollout() -> WeightsSynced:
            here = script.until(SafeBoundary, lambda fact: is_open(fact) and fact.step == 1)
            assert here.exports is None
            full = script.until(SafeBoundary, lambda fact: fact.exports is not None)
            order = script.order(full, members=[E0])
            script.decide(order)
            return script.until(WeightsSynced, lambda fact: fact.sync == order.sync)

        refused = trainer.wait(rollout, step=1)
        assert refused.failed == (Failed(E0.engine, 1, "boundary 1 is closed", False),)


def test_several_orders_in_one_sync_are_all_served(server: Embedded, tmp_path: Path) -> None:
    """An engine that was starting when the sync began is synced before the trainer goes on."""

    def late(script: Script, fact: Fact) -> Iterable[Decision]:
        if isinstance(fact, SafeBoundary) and is_open(fact):
            yield script.order(fact, members=[E0])
        if isinstance(fact, WeightsPublished):
            assert script.here is not None
            first = not script.all(WeightsPublished)
            yield script.order(script.here, members=[E1]) if first else script.release()

    with (
        Script(server.url, late) as script,
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        trainer.sync(0)
        assert len(script.all(WeightsPublished)) >= 1
    assert len({fact.sync for fact in script.all(WeightsPublished)}) == 2


def test_a_push_says_who_failed_and_who_left(server: Embedded) -> None:
    seen: list[Any] = []

    def push(version: Version, members: tuple[Member, ...], left: Left) -> dict[str, str]:
        script.decide(
            RouteFenced(
                id=script.next_id(), epoch=script.epoch, reason="dead", engine=E1.engine, incarnation=1
            )
        )
        deadline = time.monotonic() + 10
        while E1.engine not in left:
            assert time.monotonic() < deadline
        seen.append((version, members, list(left)))
        return {"e0": "refused"}

    with (
        Script(server.url, members=[E0, E1]) as script,
        relight.trainer(server.url, job="j", sync=CallbackSync(push)) as trainer,
    ):
        trainer.sync(0)
        version = Version(trainer.run, 0)
    assert seen == [(version, (E0, E1), ["e1"])]
    (synced,) = script.all(WeightsSynced)
    assert synced.loaded == ()
    assert synced.failed == (Failed(E0.engine, 1, "refused", True), Failed(E1.engine, 1, "left", True))


def test_a_push_that_raises_is_tried_once_more_and_then_raised(server: Embedded) -> None:
    def push(version: Version, members: tuple[Member, ...], left: Left) -> None:
        raise ConnectionError("no route to e0")

    def insist(script: Script, fact: Fact) -> Iterable[Decision]:
        if (isinstance(fact, SafeBoundary) and is_open(fact)) or isinstance(fact, WeightsSynced):
            assert script.here is not None
            if script.here.state == "open":
                yield script.order(script.here, members=[E0])

    with Script(server.url, insist) as script:
        with (
            pytest.raises(ConnectionError, match="no route"),
            relight.trainer(server.url, job="j", sync=CallbackSync(push, idempotent=True)) as trainer,
        ):
            trainer.sync(0)
        script.until(SafeBoundary, lambda fact: fact.state == "closed")
    assert [fact.failed for fact in script.all(WeightsSynced)][:2] == [
        (Failed(E0.engine, 1, "ConnectionError: no route to e0", True),)
    ] * 2


def test_a_snapshot_that_cannot_be_written_is_refused_and_raised(server: Embedded, tmp_path: Path) -> None:
    huge = {"huge": np.broadcast_to(np.float64(0), (1 << 45,))}
    with Script(server.url, members=[E0]) as script:
        with (
            pytest.raises(relight.RelightError, match="free: make room"),
            relight.trainer(server.url, job="j", sync=SnapshotSync(huge, tmp_path)) as trainer,
        ):
            trainer.sync(0)
        (failed,) = script.until(WeightsSynced).failed
        assert (failed.engine, failed.touched) == ("e0", False)


# --- without an orchestrator -----------------------------------------------------------------------------


def test_a_lost_orchestrator_is_an_error_where_that_was_asked(server: Embedded, tmp_path: Path) -> None:
    with (
        pytest.raises(OrchestratorLost, match="absent for"),
        relight.trainer(
            server.url,
            job="j",
            sync=SnapshotSync(arrays(), tmp_path),
            orchestrator_grace_s=0.1,
            on_lost="raise",
        ) as trainer,
    ):
        trainer.sync(0)


def test_the_first_sync_of_a_run_is_never_left_out(server: Embedded, tmp_path: Path) -> None:
    sync = SnapshotSync(arrays(), tmp_path)
    with (
        pytest.raises(OrchestratorLost, match="no weights of this run were synced yet"),
        relight.trainer(
            server.url, job="j", sync=sync, orchestrator_grace_s=0.1, on_lost="unsynced"
        ) as trainer,
    ):
        trainer.sync(0)


def test_some_syncs_are_left_out_and_then_it_ends(server: Embedded, tmp_path: Path) -> None:
    with relight.trainer(
        server.url,
        job="j",
        sync=SnapshotSync(arrays(), tmp_path),
        orchestrator_grace_s=0.5,
        max_unsynced_steps=2,
    ) as trainer:
        with Script(server.url):
            trainer.sync(0)
        trainer.sync(1)
        trainer.sync(2)
        with pytest.raises(OrchestratorLost, match="2 syncs in a row were left out"):
            trainer.sync(3)
        with Script(server.url) as script:
            trainer.sync(4)
            assert script.until(WeightsPublished, lambda fact: fact.version.step == 4)


def test_a_push_goes_on_with_the_last_members(server: Embedded) -> None:
    calls: list[tuple[Version, tuple[Member, ...]]] = []

    def push(version: Version, members: tuple[Member, ...], left: Left) -> None:
        calls.append((version, members))

    with relight.trainer(server.url, job="j", sync=CallbackSync(push), orchestrator_grace_s=0.5) as trainer:
        with Script(server.url, members=[E0, E1]) as script:
            trainer.sync(0)
            script.decide(
                RouteFenced(
                    id=script.next_id(), epoch=script.epoch, reason="x", engine=E0.engine, incarnation=1
                ),
                RouteAdded(
                    id=script.next_id(),
                    epoch=script.epoch,
                    reason="x",
                    engine=E0.engine,
                    incarnation=2,
                    address=E0.address,
                    version=Version(trainer.run, 0),
                ),
            )
        trainer.sync(1)
        run = trainer.run
    again = Member(E0.engine, 2, E0.address)
    assert calls == [(Version(run, 0), (E0, E1)), (Version(run, 1), (E1, again))] or calls[1] == (
        Version(run, 1),
        (again, E1),
    )


def test_an_orchestrator_that_says_nothing_is_lost_too(server: Embedded, tmp_path: Path) -> None:
    with (
        Script(server.url, deaf),
        pytest.raises(OrchestratorLost, match="silent"),
        relight.trainer(
            server.url, job="j", sync=SnapshotSync(arrays(), tmp_path), orphan_deadline_s=0.3
        ) as trainer,
    ):
        trainer.sync(0)


def test_an_orchestrator_that_only_observes_holds_nobody(server: Embedded, tmp_path: Path) -> None:
    def observe(script: Script, fact: Fact) -> Iterable[Decision]:
        if isinstance(fact, SafeBoundary) and is_open(fact):
            yield script.release(dry_run=True)

    with (
        Script(server.url, observe) as script,
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        trainer.sync(0)
        assert script.until(WeightsPublished).sync is None


def test_a_bus_that_is_not_there_is_told(free_port: int, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port}"
    trainer = relight.trainer(url, job="j", sync=SnapshotSync(arrays(), tmp_path), connect_s=0)
    with pytest.raises(BusUnavailable, match=str(free_port)), trainer:
        pass


def test_the_bus_may_go_away_while_the_trainer_waits(server: Embedded, tmp_path: Path) -> None:
    with relight.trainer(
        server.url,
        job="j",
        sync=SnapshotSync(arrays(), tmp_path),
        flush_s=0.1,
        on_lost="sync",
        orchestrator_grace_s=0.2,
    ) as trainer:
        server.stop()
        assert trainer.wait(lambda: 1) == 1
        trainer.sync(1)
        assert (tmp_path / f"{trainer.run}.1").is_dir()


def test_an_emptied_bus_is_told_where_the_trainer_stands(server: Embedded, tmp_path: Path) -> None:
    sync = SnapshotSync(arrays(), tmp_path)
    with (
        ExitStack() as first,
        relight.trainer(first.enter_context(Script(server.url)).url, job="j", sync=sync) as trainer,
    ):
        trainer.sync(0)
        first.close()

        def rollout() -> None:
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
            with Script(server.url) as script:
                here = script.until(SafeBoundary, is_open)
                assert (here.boundary, here.exports) == (2, Version(trainer.run, 0))
                script.decide(script.order(here, members=[E0]))
                script.until(WeightsPublished)

        trainer.wait(rollout)


def test_a_trainer_whose_run_was_taken_says_nothing_more(server: Embedded, tmp_path: Path) -> None:
    sync = SnapshotSync(arrays(), tmp_path)
    with relight.trainer(server.url, job="j", sync=sync, on_lost="raise") as trainer:

        async def take() -> None:
            async with open_bus(server.url) as bus:
                source = trainer_source(trainer.run)
                await bus.job(JobName("j")).append([], source=source, boot=BootId("other"), install=True)

        anyio.run(take)
        with pytest.raises(OrchestratorLost) as lost:
            trainer.sync(0)
        assert isinstance(lost.value.__cause__, Fenced)
        assert trainer.wait(lambda: 1) == 1


# --- the rest --------------------------------------------------------------------------------------------


def test_a_boundary_exports_in_a_thread_of_its_own(server: Embedded) -> None:
    threads: list[int] = []

    def push(version: Version, members: tuple[Member, ...], left: Left) -> None:
        threads.append(threading.get_ident())

    def recover(script: Script, boundary: int) -> None:
        here = script.until(SafeBoundary, lambda fact: is_open(fact) and fact.boundary == boundary)
        order = script.order(here, members=[E0])
        script.decide(order)
        assert script.until(WeightsSynced, lambda fact: fact.sync == order.sync).loaded == (
            Loaded(E0.engine, 1),
        )

    with (
        Script(server.url) as script,
        relight.trainer(server.url, job="j", sync=CallbackSync(push, idempotent=True)) as trainer,
    ):
        with trainer.boundary(0):
            recover(script, 1)

        async def program() -> None:
            async with trainer.boundary(0, phase="eval"):
                await asyncio.to_thread(recover, script, 2)

        asyncio.run(program())
        assert script.until(SafeBoundary, lambda fact: fact.boundary == 2).phase == "eval"
        with pytest.raises(UsageError, match="boundary 3 is still open"), trainer.boundary(0):
            trainer.wait(lambda: None)
    assert threading.get_ident() not in threads


def test_the_application_may_sync_by_itself(server: Embedded) -> None:
    with Script(server.url, members=[E0, E1]) as script, relight.trainer(server.url, job="j") as trainer:
        with trainer.syncing(1) as members:
            assert list(members) == [E0, E1]
            members.fail("e1", "timed out")
        with pytest.raises(OSError, match="link down"), trainer.syncing(2):
            raise OSError("link down")
        version = Version(trainer.run, 1)
        with pytest.raises(UsageError, match="needs a transport"):
            trainer.sync(3)
    first, second = script.all(WeightsSynced)
    assert first.version == version
    assert first.loaded == (Loaded(E0.engine, 1),)
    assert first.failed == (Failed(E1.engine, 1, "timed out", True),)
    assert [failed.touched for failed in second.failed] == [True, True]


def test_snapshots_beside_a_push_serve_the_recoveries(server: Embedded, tmp_path: Path) -> None:
    """Every second ordinary sync is followed by a snapshot; whoever lacks weights in between pulls them."""
    pushed: list[int] = []
    members_of: dict[int, list[str]] = {}

    def push(version: Version, members: tuple[Member, ...], left: Left) -> None:
        pushed.append(version.step)
        members_of[version.step] = [member.engine for member in members]

    snapshots = SnapshotSync(arrays(), tmp_path, publish_every=2)
    with (
        Script(server.url, members=[E0, E1]) as script,
        relight.trainer(
            server.url, job="j", sync=CallbackSync(push, subset=False), snapshots=snapshots
        ) as trainer,
    ):

        def recover() -> None:
            here = script.until(
                SafeBoundary, lambda fact: is_open(fact) and fact.step == 1 and not fact.pushes
            )
            assert here.exports is not None and here.subset
            order = script.order(here, members=[E1])
            script.decide(order)
            script.until(WeightsPublished, lambda fact: fact.sync == order.sync)

        for step in range(3):
            trainer.sync(step)
            if step == 1:
                trainer.wait(recover)
        run = trainer.run
    assert pushed == [0, 1, 2] and members_of[1] == ["e0", "e1"]
    ordinary = [fact.version.step for fact in script.all(WeightsPublished) if fact.sync is None]
    assert ordinary == [0]  # that of step 1 was written for a recovery, so the next one is that of step 3
    assert {fact.version for fact in script.all(WeightsPublished)} == {Version(run, 0), Version(run, 1)}
    told = [(fact.sync, fact.pushes, fact.subset) for fact in script.all(SafeBoundary) if is_open(fact)]
    assert told == [("all", True, False), ("all", True, False), ("stale", False, True), ("all", True, False)]


def test_a_snapshot_beside_a_push_that_cannot_be_written_holds_nobody_up(
    server: Embedded, tmp_path: Path
) -> None:
    huge = {"huge": np.broadcast_to(np.float64(0), (1 << 45,))}
    with (
        Script(server.url, members=[E0]) as script,
        relight.trainer(
            server.url,
            job="j",
            sync=CallbackSync(lambda version, members, left: None),
            snapshots=SnapshotSync(huge, tmp_path),
        ) as trainer,
    ):
        trainer.sync(0)
        trainer.sync(1)
    assert not script.all(WeightsPublished)
    assert len(script.all(JobFinished)) == 1


def test_a_push_that_no_recovery_could_use_is_refused(server: Embedded, tmp_path: Path) -> None:
    def push(version: Version, members: tuple[Member, ...], left: Left) -> None: ...

    with (
        Script(server.url, settings={"recover_at": "snapshot"}),
        pytest.raises(UsageError, match="and writes none: give"),
        relight.trainer(server.url, job="j", sync=CallbackSync(push)) as trainer,
    ):
        trainer.sync(0)
    with (
        Script(server.url, settings={"recover_at": "snapshot"}),
        relight.trainer(
            server.url, job="j", sync=CallbackSync(push), snapshots=SnapshotSync(arrays(), tmp_path)
        ) as trainer,
    ):
        trainer.sync(0)


def test_transports_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    url = "redis://localhost"
    with pytest.raises(UsageError, match="publish_every=4: engines that pull need every version"):
        relight.trainer(url, job="j", sync=SnapshotSync(arrays(), tmp_path, publish_every=4))
    with pytest.raises(UsageError, match="beside a sync= that pushes"):
        relight.trainer(
            url, job="j", sync=SnapshotSync(arrays(), tmp_path), snapshots=SnapshotSync(arrays(), tmp_path)
        )


def test_a_directory_that_engines_do_not_reach_ends_the_first_sync(server: Embedded, tmp_path: Path) -> None:
    if places.file_system(tmp_path) not in places.LOCAL:
        pytest.skip("the tests' own directory may be shared")
    away = Member(EngineName("e0"), 1, "http://192.0.2.7:8000")
    with Script(server.url, members=[away]) as script:
        with (
            pytest.raises(UsageError, match=r"e0 .* run elsewhere"),
            relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
        ):
            trainer.sync(0)
        (failed,) = script.until(WeightsSynced).failed
        assert not failed.touched


def test_weights_that_stand_are_announced(server: Embedded, tmp_path: Path) -> None:
    directory = Path(SnapshotSync(arrays(), tmp_path / "by").write(Version(1, 1)).uri)
    (directory / "relight-manifest.json").unlink()
    with Script(server.url) as script:
        with relight.trainer(server.url, job="j") as trainer:
            trainer.published(4, f"file://{directory}")
            trainer.wait(lambda: None)
            version = Version(trainer.run, 4)
        published = script.until(WeightsPublished)
        here = script.until(SafeBoundary)
    assert (published.sync, published.version) == (None, version)
    assert check(directory, published.digest).version == version
    assert (here.version, here.exports) == (version, None)


def test_a_resumed_trainer_announces_the_directory_that_its_older_run_announced(
    server: Embedded, tmp_path: Path
) -> None:
    directory = Path(SnapshotSync(arrays(), tmp_path / "by").write(Version(1, 1)).uri)
    (directory / "relight-manifest.json").unlink()
    with Script(server.url) as script:
        for _ in range(2):
            with relight.trainer(server.url, job="j") as trainer:
                trainer.published(4, str(directory))
                version = Version(trainer.run, 4)
                published = script.until(WeightsPublished, lambda fact, own=version: fact.version == own)
    assert len(script.all(WeightsPublished)) == 2
    assert check(directory, published.digest).version == version

    (directory / "model.safetensors").unlink()
    with (
        relight.trainer(server.url, job="j") as trainer,
        pytest.raises(SnapshotError, match=rf"not what was published as {version}"),
    ):
        trainer.published(4, str(directory))


def test_swapped_weights_are_not_exported(server: Embedded, tmp_path: Path) -> None:
    with (
        Script(server.url) as script,
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        trainer.sync(0)
        version = Version(trainer.run, 0)
        with trainer.swapped():
            trainer.wait(lambda: None)
        trainer.wait(lambda: trainer.swapped() and None)
        trainer.sync(1)
        trainer.wait(lambda: None)
    opened = [fact.exports for fact in script.all(SafeBoundary) if is_open(fact)]
    later = Version(version.run, 1)
    assert opened == [version, None, version, None, later, later]


def test_steps_never_go_back(server: Embedded, tmp_path: Path) -> None:
    with (
        Script(server.url),
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        trainer.sync(5)
        with pytest.raises(UsageError, match="step 4 is below step 5"):
            trainer.sync(4)


def test_another_trainer_takes_over(server: Embedded, tmp_path: Path) -> None:
    def newer(script: Script, fact: Fact) -> Iterable[Decision]:
        if isinstance(fact, SafeBoundary) and is_open(fact):
            order = script.order(fact)
            yield SyncWeights(
                **{f: getattr(order, f) for f in order.__struct_fields__} | {"run": fact.run + 1}
            )

    with (
        Script(server.url, newer),
        pytest.raises(Superseded, match="has taken over"),
        relight.trainer(server.url, job="j", sync=SnapshotSync(arrays(), tmp_path)) as trainer,
    ):
        trainer.sync(0)


def test_runs_grow(server: Embedded, tmp_path: Path) -> None:
    runs: list[int] = []
    for _ in range(2):
        with relight.trainer(server.url, job="j") as trainer:
            runs.append(trainer.run)
    assert runs[0] < runs[1]


def test_disabled_every_call_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELIGHT_DISABLE", "1")

    async def rollout() -> int:
        return 2

    async def program() -> None:
        async with trainer.boundary(0):
            pass

    with relight.trainer(
        "redis://nowhere.invalid", job="j", sync=SnapshotSync(arrays(), tmp_path)
    ) as trainer:
        trainer.sync(0)
        assert trainer.wait(lambda: threading.get_ident()) == threading.get_ident()  # noqa: PLW0108
        assert trainer.wait(rollout) == 2
        assert trainer.wait(lambda: rollout()) == 2  # noqa: PLW0108
        with trainer.boundary(0), trainer.swapped(), trainer.syncing(1) as members:
            assert list(members) == []
        asyncio.run(program())
        trainer.published(1, "/nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_url_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIGHT_BUS_URL", raising=False)
    with pytest.raises(UsageError, match="RELIGHT_BUS_URL"):
        relight.trainer(job="j")
    with pytest.raises(UsageError, match="job name"):
        relight.trainer("redis://localhost", job="Not a slug")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"orchestrator_grace_s": -1}, "orchestrator_grace_s must be a finite number of 0 or more, not -1"),
        ({"flush_s": float("nan")}, "flush_s must be a finite number of 0 or more, not nan"),
        ({"connect_s": "soon"}, "connect_s must be a finite number of 0 or more, not 'soon'"),
        ({"max_unsynced_steps": -1}, "max_unsynced_steps must be"),
        ({"on_lost": "panic"}, "on_lost must be one of None, 'sync', 'unsynced', 'raise', not 'panic'"),
        ({"release": "soon"}, "release must be one of 'routed', 'written', not 'soon'"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_done(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as told:
        relight.trainer("redis://127.0.0.1:1", job="j", **wrong)
    assert said in str(told.value)


def test_a_session_is_used_within_its_with_and_entered_once(server: Embedded, tmp_path: Path) -> None:
    trainer = relight.trainer(server.url, job="j")

    def calls() -> Iterator[Callable[[], object]]:
        yield lambda: trainer.wait(lambda: None)
        yield lambda: trainer.boundary(1).__enter__()
        yield lambda: trainer.syncing(1).__enter__()
        yield lambda: trainer.published(1, str(tmp_path))
        yield trainer.swapped

    for call in calls():
        with pytest.raises(UsageError, match=r"is called before `with relight\.trainer"):
            call()
    with trainer:
        trainer.wait(lambda: None)
    for call in calls():
        with pytest.raises(UsageError, match=r"is called after `with relight\.trainer"):
            call()
    with pytest.raises(UsageError, match="entered once"):
        trainer.__enter__()
