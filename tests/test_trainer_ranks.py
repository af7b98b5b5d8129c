"""A trainer of several ranks: rank 0 speaks, all take part, and nobody waits for one that is gone."""

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from relight.agents.snapshot import check
from relight.agents.stub.launch import launch
from relight.events.bus.embedded import Embedded
from relight.events.facts import JobFinished, SafeBoundary, WeightsPublished, WeightsSynced
from relight.events.ids import EngineName
from relight.events.values import Failed, Loaded, Member
from relight.events.version import Version
from tests.trainer_script import Script

pytest.importorskip("torch")

from tests import ranks_programs as programs
from tests.ranks_rig import training

E0 = Member(EngineName("e0"), 1, "http://127.0.0.1:8001")
E1 = Member(EngineName("e1"), 1, "http://127.0.0.1:8002")


def opened(fact: SafeBoundary) -> bool:
    return fact.state == "open"


def until(sign: Path) -> None:
    programs.until(sign)


def test_parameters_that_are_spread_over_ranks_are_written_whole(server: Embedded, tmp_path: Path) -> None:
    with Script(server.url, members=[E0]) as script:
        with training(programs.sharded, url=server.url, directory=tmp_path) as trainer:
            here = script.until(SafeBoundary, lambda fact: opened(fact) and fact.sync == "stale")
            assert here.exports is not None, "a forward pass gathers parameters and changes none"
            order = script.order(here, members=[E0])
            script.decide(order)
            script.until(WeightsPublished, lambda fact: fact.sync == order.sync)
            (tmp_path / "recovered").touch()
            told: list[dict[str, Any]] = [trainer.returned(rank) for rank in (0, 1)]
        finished = script.until(JobFinished)
    assert [one["waited"] for one in told] == [0, 1]
    assert told[0]["weights"] == told[1]["weights"] and told[0]["run"] == told[1]["run"] == finished.run
    exports = [fact.exports and fact.exports.step for fact in script.all(SafeBoundary) if opened(fact)]
    assert exports == [0, 0, None, 1, 1]
    last = script.all(WeightsPublished)[-1]
    manifest = check(Path(last.uri), last.digest)
    assert manifest.version == Version(finished.run, 1)
    written: dict[str, Any] = {}
    for shard in Path(last.uri).glob("*.safetensors"):
        written |= load_file(shard)
    assert written.keys() == {name for name in told[0]["weights"] if name != "head.weight"}
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, np.array(told[0]["weights"][name], dtype=np.float32))


def test_weights_that_are_written_back_are_exported_again_if_they_are_back_on_every_rank(
    server: Embedded, tmp_path: Path
) -> None:
    with Script(server.url, members=[E0]) as script:
        with training(programs.swapped, url=server.url, directory=tmp_path) as trainer:
            trainer.returned(0)
            trainer.returned(1)
        script.until(JobFinished)
    exports = [fact.exports and fact.exports.step for fact in script.all(SafeBoundary) if opened(fact)]
    assert exports == [0, None, 0, None, None]


def test_a_function_gathers_on_every_rank_and_what_rank_0_has_is_written(
    server: Embedded, tmp_path: Path
) -> None:
    with (
        Script(server.url, members=[E0]) as script,
        training(programs.gathered, url=server.url, directory=tmp_path) as trainer,
    ):
        for rank in (0, 1):
            assert "give SnapshotSync a function" in trainer.returned(rank)["refused"]
        published = script.until(WeightsPublished)
    tensors = check(Path(published.uri), published.digest).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "embed.weight": (8, 6),
        "head.weight": (8, 6),
        "middle.weight": (6, 6),
        "middle.bias": (6,),
    }


def test_no_boundary_opens_before_every_rank_has_come(server: Embedded, tmp_path: Path) -> None:
    with (
        Script(server.url, members=[E0]) as script,
        training(programs.late_to_the_sync, url=server.url, directory=tmp_path) as trainer,
    ):
        until(tmp_path / "up.0")
        time.sleep(0.3)  # rank 0 is in its sync by now; it would have been said
        assert not script.all(SafeBoundary)
        (tmp_path / "go").touch()
        trainer.returned(0)
        trainer.returned(1)
        assert script.until(SafeBoundary, opened)


def test_pushes_and_failures_are_those_of_all_ranks(server: Embedded, tmp_path: Path) -> None:
    with Script(server.url, members=[E0, E1]) as script:
        with training(programs.pushed, url=server.url, directory=tmp_path) as trainer:
            for number, sign in ((2, "recovered"), (3, "again")):
                here = script.until(SafeBoundary, lambda fact, n=number: opened(fact) and fact.boundary == n)
                order = script.order(here, members=[E0])
                script.decide(order)
                answer = script.until(WeightsSynced, lambda fact, s=order.sync: fact.sync == s)
                assert answer.loaded == (Loaded(E0.engine, 1),)
                (tmp_path / sign).touch()
            first, second = trainer.returned(0), trainer.returned(1)
        script.until(JobFinished)
    once = [0, ["e0", "e1"], True]
    assert [list(call) for call in first["calls"][:3]] == [once, [0, ["e0"], True], [0, ["e0"], False]]
    assert first["calls"] == second["calls"]
    assert first["members"] == second["members"] == ["e0", "e1"]
    own = script.until(WeightsSynced, lambda fact: fact.version.step == 1)
    assert own.loaded == (Loaded(E0.engine, 1),)
    assert own.failed == (Failed(E1.engine, 1, "link down", True),)
    assert (first["_fails"], second["_fails"]) == (
        "RankFailed: rank 1: LookupError: no prompts",
        "LookupError: no prompts",
    )
    assert "step 0 is below step 1" in first["_refused"] and "step 0 is below step 1" in second["_refused"]
    assert first["_parts"] == second["_parts"] and "rank 1: wait(8)" in first["_parts"]
    (broken,) = [fact for fact in script.all(WeightsSynced) if fact.version.step == 2]
    assert [(failed.error, failed.touched) for failed in broken.failed] == [
        ("RankFailed: rank 1: ConnectionError: no route", True)
    ] * 2
    assert first["after"] == second["after"] == "still together"


def test_a_transfer_that_breaks_in_its_middle_hangs_no_rank(server: Embedded, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    tensors = {"embed.weight": (8, 6), "middle.weight": (6, 6), "middle.bias": (6,)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, base / "m.safetensors")
    with launch(base) as stub, Script(server.url) as script:
        script.members = (Member(EngineName("e0"), 1, f"http://127.0.0.1:{stub.port}"),)
        with training(programs.transferred, url=server.url, directory=tmp_path) as trainer:
            first = script.until(WeightsSynced)
            assert [(failed.engine, failed.touched) for failed in first.failed] == [("e0", True)]
            assert "the link broke" in first.failed[0].error
            for rank in (0, 1):
                until(tmp_path / f"broken.{rank}")
            assert stub.post("/finish_weight_update", {}).status == 200  # as if it had been restarted
            (tmp_path / "mended").touch()
            run = trainer.returned(0)
            assert trainer.returned(1) == run
        assert script.until(WeightsSynced, lambda fact: bool(fact.loaded)).version == Version(run, 1)
        assert stub.get("/weight_info").body["weight_version"] == f"{run}.1"
        sent = load_file(tmp_path / "sent" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in sent.items()} == tensors


def test_a_write_that_fails_ends_the_sync_on_every_rank(server: Embedded, tmp_path: Path) -> None:
    with (
        Script(server.url, members=[E0]) as script,
        training(programs.full_disk, url=server.url, directory=tmp_path) as trainer,
    ):
        assert trainer.told(0)[0] == "SnapshotError"
        how, text = trainer.told(1)
        assert how == "RankFailed" and "make room" in text
        (failed,) = script.until(WeightsSynced).failed
        assert not failed.touched
    assert not script.all(JobFinished)


@pytest.mark.parametrize(("lost", "by"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_that_ends_or_stalls_hangs_nobody(
    server: Embedded, tmp_path: Path, lost: int, by: signal.Signals
) -> None:
    with (
        Script(server.url) as script,
        training(programs.waiting, url=server.url, directory=tmp_path) as trainer,
    ):
        for rank in (0, 1):
            until(tmp_path / f"waits.{rank}")
        trainer.send(lost, by)
        how, text = trainer.told(1 - lost, within_s=15)
        assert how == "RanksLost" and "another rank" in text
        if lost == 1:
            script.until(SafeBoundary, lambda fact: fact.state == "closed")
    assert not script.all(JobFinished)
