"""One contract for every way in which weights reach engines: each transport keeps all of it.

Engines are real stubs. The test plays the session, and for weights that are pulled the engines' agents.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relight.agents.snapshot import check
from relight.agents.stub.launch import Stub, launch
from relight.agents.stub.tokens import reference, weights_digest
from relight.agents.trainer.callback import CallbackSync
from relight.agents.trainer.group import Control, Meeting, Sender, Source
from relight.agents.trainer.snapshot import SnapshotSync
from relight.agents.trainer.sync import Left, WeightSync
from relight.agents.trainer.transfer import VllmTransferSync
from relight.events.decisions import SyncWeights
from relight.events.errors import RelightError
from relight.events.facts import WeightsPublished, WeightsSynced
from relight.events.ids import DecisionId, EngineName, SyncId
from relight.events.values import Failed, Loaded, Member
from relight.events.version import Version
from tests.conftest import write_model

torch: Any = pytest.importorskip("torch")

PROMPT = [5, 6, 7]
RELOAD = "/collective_rpc"


class Engines:
    """Two stub engines, e0 and e1; e1 serves, and e0 is paused as a stale one is."""

    def __init__(self, stubs: list[Stub]) -> None:
        self.stubs = dict(zip((EngineName("e0"), EngineName("e1")), stubs, strict=True))
        self.members = tuple(
            Member(name, 1, f"http://127.0.0.1:{stub.port}") for name, stub in self.stubs.items()
        )

    def fresh(self) -> None:
        for stub in self.stubs.values():
            stub.knobs(transfer="load", reload="load")
            stub.post("/finish_weight_update", {})
            assert stub.post(RELOAD, {"method": "reload_weights", "kwargs": {}}).status == 200
            assert stub.post("/update_weight_version", {"new_version": "default"}).status == 200
            assert stub.post("/resume").status == 200
        assert self.stubs[EngineName("e0")].post("/pause?mode=abort").status == 200

    def computes_with(self, name: str, weights: Path) -> bool:
        """Whether what the engine generates is what these weights generate."""
        stub = self.stubs[EngineName(name)]
        paused = self.is_paused(name)
        stub.post("/resume")
        made = stub.generate(PROMPT, 8).body["choices"][0]["token_ids"]
        if paused:
            stub.post("/pause?mode=abort")
        return bool(made == reference(weights_digest(weights), PROMPT, 8)[0])

    def is_paused(self, name: str) -> bool:
        return bool(self.stubs[EngineName(name)].get("/is_paused").body["is_paused"])

    def label(self, name: str) -> str:
        return str(self.stubs[EngineName(name)].get("/weight_info").body["weight_version"])


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    base = write_model(tmp_path_factory.mktemp("transports") / "base", seed=0)
    with ExitStack() as stack:
        yield Engines([stack.enter_context(launch(base)) for _ in range(2)])


@pytest.fixture
def engines(stubs: Engines) -> Engines:
    stubs.fresh()
    return stubs


class Trained(torch.nn.Module):  # type: ignore[misc]
    """A module with the tensors of a stub's model."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from safetensors.torch import load_file

        tensors = load_file(write_model(folder, seed=1) / "model.safetensors")
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(16, 8)
        self.lm_head = torch.nn.Linear(8, 16, bias=False)
        self.load_state_dict(tensors)


class Folders:
    """A backend of the transfer for stubs: what would go over the wire lies in a folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.groups: list[int] = []
        self.open = 0

    def __call__(self, meeting: Meeting, control: Control, source: Source) -> Sender:
        control.init_weight_transfer_engine({"rank_offset": 1, "world_size": meeting.world_size})
        self.groups.append(meeting.world_size)
        self.open += 1
        return _Folder(self, control, source)


class _Folder:
    def __init__(self, made_by: Folders, control: Control, source: Any) -> None:
        self._made_by = made_by
        self._control = control
        self._source = source

    def send_weights(self) -> None:
        self._control.start_weight_update()
        folder = self._made_by.directory / str(len(list(self._made_by.directory.iterdir())))
        folder.mkdir()
        save_file({name: tensor.numpy() for name, tensor in self._source}, folder / "model.safetensors")
        self._control.update_weights({"folder": str(folder)})
        self._control.finish_weight_update()

    def shutdown(self) -> None:
        self._made_by.open -= 1


Make = Callable[[Trained, Engines, Path], WeightSync]


def _snapshot(model: Trained, engines: Engines, directory: Path) -> WeightSync:
    return SnapshotSync(model, directory)


def _callback(model: Trained, engines: Engines, directory: Path) -> WeightSync:
    """An application that saves and tells each engine to load."""

    def push(version: Version, members: tuple[Member, ...], left: Left) -> dict[str, str]:
        save_file(
            {name: value.numpy() for name, value in model.state_dict().items()},
            directory / "model.safetensors",
        )
        errors: dict[str, str] = {}
        for member in members:
            stub = engines.stubs[member.engine]
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            answer = stub.post(RELOAD, body)
            if answer.status != 200:
                errors[member.engine] = str(answer.body)
            stub.post("/update_weight_version", {"new_version": str(version)})
        return errors

    return CallbackSync(push, idempotent=True)


def _transfer(model: Trained, engines: Engines, directory: Path) -> WeightSync:
    return VllmTransferSync(model, open_group=Folders(directory), timeout_s=5.0)


TRANSPORTS: dict[str, Make] = {"snapshot": _snapshot, "callback": _callback, "transfer": _transfer}


class Case:
    """One transport, its engines, and the weights that it hands over."""

    def __init__(self, make: Make, engines: Engines, directory: Path) -> None:
        self.weights = directory / "weights"
        self.model = Trained(self.weights)
        self.engines = engines
        (directory / "transport").mkdir()
        self.sync = make(self.model, engines, directory / "transport")
        self.gone: set[EngineName] = set()

    def order(self, *names: str, step: int = 4) -> SyncWeights:
        members = tuple(member for member in self.engines.members if member.engine in names)
        return SyncWeights(
            id=DecisionId("1-1"),
            epoch=1,
            reason="test",
            sync=SyncId(f"s{step}"),
            run=7,
            boundary=1,
            version=Version(7, step),
            members=members,
            deadline=0,
        )

    def export(self, order: SyncWeights) -> WeightsSynced:
        """Export and, for what is to be pulled, load it as agents do."""
        left = Left(order.members, lambda member: member.engine in self.gone)
        answer = self.sync.export(order, left)
        assert answer.sync == order.sync and answer.version == order.version
        assert isinstance(answer, WeightsSynced) is self.sync.pushes
        if isinstance(answer, WeightsSynced):
            return answer
        return self._pulled(order, answer)

    def _pulled(self, order: SyncWeights, published: WeightsPublished) -> WeightsSynced:
        assert check(Path(published.uri), published.digest).version == order.version
        loaded: list[Loaded] = []
        failed: list[Failed] = []
        for member in order.members:
            if member.engine in self.gone:
                failed.append(Failed(member.engine, 1, "left", False))
                continue
            stub = self.engines.stubs[member.engine]
            body = {"method": "reload_weights", "kwargs": {"weights_path": published.uri}}
            if stub.post(RELOAD, body).status != 200:
                failed.append(Failed(member.engine, 1, "refused", True))
                continue
            stub.post("/update_weight_version", {"new_version": str(order.version)})
            loaded.append(Loaded(member.engine, 1))
        return WeightsSynced(
            sync=order.sync, version=order.version, loaded=tuple(loaded), failed=tuple(failed)
        )


@pytest.fixture(params=TRANSPORTS)
def case(request: pytest.FixtureRequest, engines: Engines, tmp_path: Path) -> Iterator[Case]:
    made = Case(TRANSPORTS[request.param], engines, tmp_path)
    yield made
    made.sync.close()


def test_every_member_holds_the_weights_under_their_version(case: Case) -> None:
    answer = case.export(case.order("e0", "e1"))
    assert [loaded.engine for loaded in answer.loaded] == ["e0", "e1"] and not answer.failed
    for name in ("e0", "e1"):
        assert case.engines.computes_with(name, case.weights)
        assert case.engines.label(name) == "7.4"


def test_who_served_serves_and_who_was_paused_stays_so(case: Case) -> None:
    case.export(case.order("e0", "e1"))
    assert case.engines.is_paused("e0") and not case.engines.is_paused("e1")


def test_engines_that_are_not_named_notice_nothing(case: Case) -> None:
    stub = case.engines.stubs[EngineName("e1")]
    generation = stub.stream(PROMPT, 60)
    next(generation)
    before = len(stub.lines)
    assert [loaded.engine for loaded in case.export(case.order("e0")).loaded] == ["e0"]
    rest = [event for event in generation if isinstance(event, dict)]
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    said = [line for line in stub.lines[before:] if "POST" in line and "generate" not in line]
    assert not said, "nobody paused it, or asked it for anything else"
    assert case.engines.label("e1") == "default"


def test_a_version_can_be_handed_to_a_late_member_too(case: Case) -> None:
    case.export(case.order("e1"))
    assert case.sync.exportable(Version(7, 4))
    answer = case.export(case.order("e0"))
    assert [loaded.engine for loaded in answer.loaded] == ["e0"]
    assert case.engines.computes_with("e0", case.weights)


def test_who_left_before_is_not_touched_and_not_said_to_have_loaded(case: Case) -> None:
    case.gone = {EngineName("e1")}
    answer = case.export(case.order("e0", "e1"))
    assert [loaded.engine for loaded in answer.loaded] == ["e0"]
    assert answer.failed == (Failed(EngineName("e1"), 1, "left", False),)
    assert case.engines.label("e1") == "default"


def test_a_sync_to_nobody_is_done(case: Case) -> None:
    answer = case.export(case.order())
    assert answer.loaded == answer.failed == ()


def test_the_weights_are_those_of_the_moment(case: Case) -> None:
    case.export(case.order("e1"))
    with torch.no_grad():
        case.model.lm_head.weight.add_(1)
    case.export(case.order("e1", step=5))
    assert not case.engines.computes_with("e1", case.weights)
    assert case.engines.label("e1") == "7.5"


def test_one_that_refuses_is_told_from_those_that_load(case: Case) -> None:
    case.engines.stubs[EngineName("e0")].knobs(reload="fail", transfer="refuse")
    answer = case.export(case.order("e0", "e1"))
    assert "e0" in {failed.engine for failed in answer.failed}
    assert {failed.engine for failed in answer.failed} | {loaded.engine for loaded in answer.loaded} == {
        "e0",
        "e1",
    }


def test_closing_twice_harms_nobody(case: Case) -> None:
    case.export(case.order("e1"))
    case.sync.close()
    assert not case.engines.is_paused("e1")


# --- what is the transfer's own ----------------------------------------------------------------------


@pytest.fixture
def transfer(engines: Engines, tmp_path: Path) -> Iterator[tuple[Case, Folders]]:
    folders = Folders(tmp_path / "transport")

    def make(model: Trained, engines: Engines, directory: Path) -> WeightSync:
        return VllmTransferSync(model, open_group=folders, timeout_s=2.0)

    case = Case(make, engines, tmp_path)
    yield case, folders
    case.sync.close()
    assert folders.open == 0


def test_a_group_lasts_as_long_as_its_members_are_the_same(transfer: tuple[Case, Folders]) -> None:
    case, folders = transfer
    for step in (1, 2):
        case.export(case.order("e0", "e1", step=step))
    case.export(case.order("e0", step=3))
    case.export(case.order("e0", "e1", step=4))
    assert folders.groups == [3, 2, 3]
    assert folders.open == 1


@pytest.mark.parametrize(("fault", "touched"), [("refuse", False), ("fail", True)])
def test_an_update_that_fails_taints_every_engine_that_began_it(
    transfer: tuple[Case, Folders], fault: str, touched: bool
) -> None:
    case, folders = transfer
    case.engines.stubs[EngineName("e1")].knobs(transfer=fault)
    answer = case.export(case.order("e0", "e1"))
    assert not answer.loaded
    assert {failed.engine: failed.touched for failed in answer.failed} == {"e0": True, "e1": touched}
    assert case.engines.is_paused("e1") is touched, "who was not touched serves on"
    assert folders.open == 0, "its group is not used again"
    for stub in case.engines.stubs.values():
        stub.knobs(transfer="load")
        stub.post("/finish_weight_update", {})
    assert case.export(case.order("e0", "e1")).failed == ()


def test_an_engine_that_cannot_end_its_update_taints_no_other(transfer: tuple[Case, Folders]) -> None:
    case, _ = transfer
    case.engines.stubs[EngineName("e0")].knobs(transfer="finish")
    answer = case.export(case.order("e0", "e1"))
    assert [loaded.engine for loaded in answer.loaded] == ["e1"]
    (failed,) = answer.failed
    assert (failed.engine, failed.touched) == ("e0", True) and "500" in failed.error
    assert not case.engines.is_paused("e1")
    case.engines.stubs[EngineName("e0")].knobs(transfer="load")
    case.engines.stubs[EngineName("e0")].post("/finish_weight_update", {})


@pytest.mark.parametrize("leaves", [True, False])
def test_an_engine_that_hangs_holds_nobody(tmp_path: Path, leaves: bool) -> None:
    """Its death is told by the orchestrator, and ends the transfer; without that the time-out does."""
    folders = Folders(tmp_path / "transport")
    with ExitStack() as stack:
        base = write_model(tmp_path / "base", seed=0)
        hanging = Engines([stack.enter_context(launch(base)) for _ in range(2)])
        timeout_s = 20.0 if leaves else 0.5
        case = Case(
            lambda model, engines, directory: VllmTransferSync(
                model, open_group=folders, timeout_s=timeout_s
            ),
            hanging,
            tmp_path,
        )
        hanging.stubs[EngineName("e1")].knobs(transfer="hang")
        threading.Timer(0.2, lambda: case.gone.update({EngineName("e1")} if leaves else ())).start()
        began = time.monotonic()
        answer = case.export(case.order("e0", "e1"))
        assert time.monotonic() - began < 10.0
        why = "e1 left" if leaves else "not done within 0.5 s"
        errors = {failed.engine: failed.error for failed in answer.failed}
        assert why in errors["e1"] or "timed out" in errors["e1"]
        assert all(failed.touched for failed in answer.failed) and len(errors) == 2
    assert folders.open == 0


def test_an_engine_that_sleeps_is_refused_and_nobody_is_touched(transfer: tuple[Case, Folders]) -> None:
    case, _ = transfer
    stub = case.engines.stubs[EngineName("e0")]
    stub.post("/sleep?level=1")
    answer = case.export(case.order("e0", "e1"))
    assert {(failed.error, failed.touched) for failed in answer.failed} == {
        ("RelightError: asleep: e0", False)
    }
    assert not case.engines.is_paused("e1")
    stub.post("/wake_up")


def test_an_engine_that_goes_on_in_the_middle_of_an_update_is_not_said_to_be_well(
    engines: Engines, tmp_path: Path
) -> None:
    """One of its ranks was woken by a late request: what it computed meanwhile nobody knows."""

    class Woken(_Folder):
        def send_weights(self) -> None:
            super().send_weights()
            engines.stubs[EngineName("e1")].post("/resume")

    folders = Folders(tmp_path / "transport")

    def opened(meeting: Meeting, control: Control, source: Source) -> Sender:
        folders(meeting, control, source)
        return Woken(folders, control, source)

    case = Case(
        lambda model, engines, directory: VllmTransferSync(model, open_group=opened), engines, tmp_path
    )
    answer = case.export(case.order("e0", "e1"))
    assert all(failed.touched and "not paused: e1" in failed.error for failed in answer.failed)
    assert not answer.loaded


def test_a_group_that_a_dead_trainer_left_is_closed_before_the_next_one_is_opened(
    engines: Engines, tmp_path: Path
) -> None:
    stub = engines.stubs[EngineName("e1")]
    before = len(stub.lines)
    for life in ("dead", "next"):
        (tmp_path / life).mkdir()
        case = Case(_transfer, engines, tmp_path / life)
        assert case.export(case.order("e1")).failed == ()
    calls = [line for line in stub.lines[before:] if "weight_transfer_engine" in line]
    names = ["shutdown" if "shutdown" in call else "init" for call in calls]
    assert names == ["shutdown", "init", "shutdown", "init"]


def test_a_group_that_cannot_be_opened_touches_nobody(engines: Engines, tmp_path: Path) -> None:
    def broken(meeting: Meeting, control: Control, source: Source) -> Sender:
        raise RelightError("no rendezvous")

    case = Case(
        lambda model, engines, directory: VllmTransferSync(model, open_group=broken), engines, tmp_path
    )
    answer = case.export(case.order("e0", "e1"))
    assert [(failed.error, failed.touched) for failed in answer.failed] == [
        ("RelightError: no rendezvous", False)
    ] * 2
    assert not case.engines.is_paused("e1")


def test_a_transfer_takes_a_module(tmp_path: Path) -> None:
    with pytest.raises(RelightError, match="torch module, not dict"):
        VllmTransferSync({"w": np.zeros(1)})
    with pytest.raises(RelightError, match="timeout_s=0"):
        VllmTransferSync(torch.nn.Linear(1, 1), timeout_s=0)
