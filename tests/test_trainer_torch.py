"""Torch models: the names a checkpoint has, the bytes of the live parameters, and whether those changed."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.agents.snapshot import Tensor, read_manifest
from relight.agents.trainer.live import Live
from relight.agents.trainer.snapshot import SnapshotSync
from relight.events.errors import UsageError
from relight.events.version import Version

torch: Any = pytest.importorskip("torch")
safetensors_torch: Any = pytest.importorskip("safetensors.torch")


class Tied(torch.nn.Module):  # type: ignore[misc]
    """As a language model: the head is the embedding."""

    _tied_weights_keys = ("lm_head.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(4, 8, bias=False)
        self.embed = torch.nn.Embedding(8, 4)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def written(model: Any, directory: Path) -> dict[str, Any]:
    sync = SnapshotSync(model, directory)
    place = Path(sync.write(Version(7, 0)).uri)
    sync.close()
    loaded: dict[str, Any] = safetensors_torch.load_file(place / "model.safetensors")
    assert read_manifest(place).tensors.keys() == loaded.keys()
    return loaded


def test_a_tied_tensor_is_written_once_under_the_name_that_a_checkpoint_keeps(tmp_path: Path) -> None:
    model = Tied()
    loaded = written(model, tmp_path)
    assert loaded.keys() == {"embed.weight", "table"}
    assert torch.equal(loaded["embed.weight"], model.embed.weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_every_bit_of_a_dtype_is_kept(tmp_path: Path, dtype: str) -> None:
    tensor = torch.linspace(-2, 2, 24).reshape(4, 6).to(getattr(torch, dtype)).t()
    loaded = written(lambda: {"w": tensor}, tmp_path)["w"]
    assert loaded.dtype == tensor.dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0] = torch.compile(model[0], backend="eager")
    loaded = written(torch.nn.DataParallel(torch.compile(model, backend="eager")), tmp_path)
    assert loaded.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_config_is_written_with_the_architecture(tmp_path: Path) -> None:
    class Config:
        architectures: Any = None
        dtype: Any = None

        def save_pretrained(self, directory: Path) -> None:
            (directory / "config.json").write_text(f"{self.architectures} {self.dtype}")

    model = Tied()
    model.config = Config()
    model.dtype = torch.float32
    written(model, tmp_path)
    assert (tmp_path / "7.0" / "config.json").read_text() == "['Tied'] float32"
    assert model.config.architectures is None


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_step_is_seen(tmp_path: Path, foreach: bool) -> None:
    model = torch.nn.Linear(3, 3)
    live = Live(7, SnapshotSync(model, tmp_path))
    version = live.mark(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=foreach)
    model(torch.ones(3)).sum().backward()
    assert live.exports(None) == version
    optimizer.step()
    assert live.exports(None) is None
    with pytest.raises(UsageError, match="step 0 was synced before and the weights have changed"):
        live.mark(0)
    assert live.mark(1) == live.exports(None) == Version(7, 1)


def test_weights_swapped_by_their_storage_are_seen_and_known_again(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    live = Live(7, SnapshotSync(model, tmp_path))
    version = live.mark(0)
    own = model.weight.data
    model.weight.data = torch.zeros(3, 3)
    assert live.exports(None) is None
    model.weight.data = own
    assert live.exports(None) == version


def _overwritten(model: Any, value: Any) -> None:
    """As `load_state_dict` does."""
    with torch.no_grad():
        model.weight.copy_(value)


def test_weights_that_are_written_back_in_place_are_the_same_again(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    live = Live(7, SnapshotSync(model, tmp_path))
    version = live.mark(0)
    own = model.weight.detach().clone()
    for _ in range(2):
        back = live.swap()
        _overwritten(model, torch.zeros(3, 3))
        inner = live.swap()
        inner()
        assert live.exports(None) is None, "the one around it has not ended"
        _overwritten(model, own)
        back()
        assert live.exports(None) == version


@pytest.mark.parametrize("how", ["stepped before", "synced within", "left by an exception"])
def test_a_swap_makes_no_other_weights_those_of_a_version(tmp_path: Path, how: str) -> None:
    model = torch.nn.Linear(3, 3)
    live = Live(7, SnapshotSync(model, tmp_path))
    live.mark(0)
    if how == "stepped before":
        _overwritten(model, torch.ones(3, 3))
    if how == "left by an exception":
        live.swap()
    back = live.swap()
    _overwritten(model, torch.zeros(3, 3))
    if how == "synced within":
        assert live.mark(1) == live.exports(None)
    _overwritten(model, torch.ones(3, 3))
    back()
    assert live.exports(None) is None


def test_weights_that_are_replaced_twice_are_not_taken_for_the_first_ones(tmp_path: Path) -> None:
    """An optimizer that makes new tensors: the second one may lie where the first one was."""
    model = torch.nn.Linear(64, 64)
    live = Live(7, SnapshotSync(model, tmp_path))
    live.mark(0)
    addresses = {model.weight.data_ptr()}
    for _ in range(8):
        model.weight.data = model.weight.data + 1
        addresses.add(model.weight.data_ptr())
        assert live.exports(None) is None
    assert len(addresses) < 9, "no address came back: nothing was tested"


OPERATIONS = ("step", "sync", "swap", "restore", "replace", "overwrite", "rest")


@given(st.lists(st.sampled_from(OPERATIONS), max_size=12), st.data())
def test_what_is_said_to_be_a_version_is_that_version_whatever_was_done(
    operations: list[str], data: st.DataObject
) -> None:
    """Optimizer steps, skipped syncs, reference weights swapped in and out, tensors replaced."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    live = Live(7, SnapshotSync(model, "/nowhere"))
    known: dict[Version, Any] = {live.mark(0): model.weight.detach().clone()}
    own, step = None, 0
    untouched = True
    for operation in operations:
        match operation:
            case "step":
                model(torch.ones(3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                untouched = False
            case "sync":
                step += 1
                known[live.mark(step)] = model.weight.detach().clone()
                own, untouched = None, True
            case "swap" if own is None:
                own, model.weight.data = model.weight.data, torch.zeros(2, 3)
            case "restore" if own is not None:
                model.weight.data, own = own, None
            case "replace":
                model.weight.data = model.weight.data + 1
                untouched = False
            case "overwrite":
                with torch.no_grad():
                    model.weight.copy_(torch.ones(2, 3))
                untouched = False
            case _:
                pass
        exports = live.exports(data.draw(st.sampled_from([None, step, step + 1])))
        assert exports is None or torch.equal(model.weight, known[exports])
    if untouched and own is None:
        assert live.exports(None) == live.version


def test_a_given_step_speaks_for_what_cannot_be_seen(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    live = Live(7, SnapshotSync(model, tmp_path))
    version = live.mark(0)
    model.weight.data.add_(1)
    assert live.exports(0) == version
    assert live.exports(1) is None


def test_the_first_boundary_of_a_run_marks_what_it_finds(tmp_path: Path) -> None:
    live = Live(7, SnapshotSync(torch.nn.Linear(3, 3), tmp_path))
    assert live.exports(12) == live.version == Version(7, 12)


def test_scalars_and_empty_tensors_are_kept(tmp_path: Path) -> None:
    loaded = written(lambda: {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}, tmp_path)
    assert loaded["scalar"].item() == 3.0
    assert read_manifest(tmp_path / "7.0").tensors["empty"] == Tensor("F32", (0, 4))
