"""What the ranks of `test_trainer_ranks` do, as an application would write it."""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import relight
from relight.agents.trainer.ranks import RankFailed
from relight.agents.trainer.sync import Left
from relight.events.errors import UsageError
from relight.events.values import Member
from relight.events.version import Version
from tests.ranks_rig import WITHIN_S, Place


def until(sign: Path) -> None:
    """Wait for another process's sign."""
    deadline = time.monotonic() + WITHIN_S
    while not sign.exists():
        assert time.monotonic() < deadline, f"no {sign}"
        time.sleep(0.005)


def _sharded_model() -> Any:
    """A language model's form: the head is the embedding; a pass leaves the root's parameters gathered."""
    import torch
    from torch.distributed.fsdp import fully_shard

    class Model(torch.nn.Module):
        _tied_weights_keys = ("head.weight",)

        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(6, 8, bias=False)
            self.embed = torch.nn.Embedding(8, 6)
            self.middle = torch.nn.Linear(6, 6)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.middle(self.embed(tokens)))

    torch.manual_seed(20)
    model: Any = Model()
    fully_shard(model.middle)
    fully_shard(model)
    return model


def _pass(model: Any) -> Any:
    import torch

    return model(torch.arange(8))


def _step(model: Any) -> Any:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _pass(model).sum().backward()
    optimizer.step()


def sharded(place: Place) -> dict[str, Any]:
    """Sync, recover, step and sync again with parameters of which each rank holds a part."""
    model = _sharded_model()
    sync = relight.SnapshotSync(model, place.directory / "weights", max_shard_bytes=100)
    seen: dict[str, Any] = {}
    with relight.trainer(place.url, job="j", sync=sync) as trainer:
        trainer.sync(0)
        _pass(model)
        seen["waited"] = trainer.wait(lambda: until(place.directory / "recovered") or place.rank)
        _step(model)
        trainer.wait(lambda: None)
        trainer.sync(1)
        trainer.wait(lambda: None, step=1)
        seen["run"] = trainer.run
        seen["weights"] = {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}
    return seen


def swapped(place: Place) -> None:
    """Evaluate other weights, written over the trained ones, which are written back: wholly, and in part."""
    import torch

    model = _sharded_model()
    sync = relight.SnapshotSync(model, place.directory / "weights")

    def evaluate(trainer: Any, *, fails: bool) -> None:
        own = [tensor.detach().clone() for tensor in model.parameters()]
        with trainer.swapped(), torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()
            trainer.wait(lambda: None)
            if fails and place.rank == 1:
                raise ArithmeticError("of the evaluation")
            for tensor, before in zip(model.parameters(), own, strict=True):
                tensor.copy_(before)

    with relight.trainer(place.url, job="j", sync=sync) as trainer:
        trainer.sync(0)
        evaluate(trainer, fails=False)
        trainer.wait(lambda: None)
        with suppress(ArithmeticError):
            evaluate(trainer, fails=True)
        trainer.wait(lambda: None)


def gathered(place: Place) -> dict[str, Any]:
    """A function of the application gathers; flat parameters, which only it could, are refused."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = _sharded_model()

    def tensors() -> dict[str, Any]:
        whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        return whole if place.rank == 0 else {}

    sync = relight.SnapshotSync(tensors, place.directory / "weights", max_shard_bytes=100)
    with relight.trainer(place.url, job="j", sync=sync) as trainer:
        trainer.sync(0)
    flat = FullyShardedDataParallel(torch.nn.Linear(8, 6), device_id=torch.device("cpu"))
    try:
        relight.SnapshotSync(flat, place.directory / "flat").write(Version(1, 0))
    except UsageError as error:
        return {"refused": str(error)}
    return {}


def late_to_the_sync(place: Place) -> None:
    """Rank 1 comes to the sync when it is told to."""
    sync = relight.SnapshotSync({"w": __import__("numpy").ones(3)}, place.directory / "weights")
    with relight.trainer(place.url, job="j", sync=sync) as trainer:
        place.note("up")
        if place.rank == 1:
            until(place.directory / "go")
        trainer.sync(0)


def pushed(place: Place) -> dict[str, Any]:
    """The application's own transfer, on every rank; then its own sync; then failures of one rank."""
    calls: list[tuple[int, list[str], bool]] = []

    def push(version: Version, members: tuple[Member, ...], left: Left) -> None:
        here = threading.current_thread() is threading.main_thread()
        calls.append((version.step, [member.engine for member in members], here))
        if version.step == 2 and place.rank == 1:
            raise ConnectionError("no route")

    seen: dict[str, Any] = {"calls": calls}
    with relight.trainer(place.url, job="j", sync=relight.CallbackSync(push, idempotent=True)) as trainer:
        trainer.sync(0)
        trainer.wait(lambda: until(place.directory / "recovered"))
        with trainer.boundary(0):
            until(place.directory / "again")
        with trainer.syncing(1) as members:
            seen["members"] = [member.engine for member in members]
            if place.rank == 1:
                members.fail("e1", "link down")
        for call in (_fails, _refused, _parts):
            try:
                call(trainer, place)
            except (RankFailed, UsageError, LookupError, ConnectionError) as error:
                seen[call.__name__] = f"{type(error).__name__}: {error}"
        trainer.sync(2)
        seen["after"] = trainer.wait(lambda: "still together")
    return seen


def _fails(trainer: Any, place: Place) -> None:
    def rollout() -> None:
        if place.rank == 1:
            raise LookupError("no prompts")
        time.sleep(60)

    trainer.wait(rollout)


def _refused(trainer: Any, place: Place) -> None:
    trainer.sync(1 if place.rank == 0 else 0)


def _parts(trainer: Any, place: Place) -> None:
    trainer.wait(lambda: None, step=7 + place.rank)


def full_disk(place: Place) -> None:
    """Rank 0 cannot write what the ranks were about to gather."""
    import numpy as np

    def model() -> dict[str, Any]:
        return {"huge": np.broadcast_to(np.float64(0), (1 << 45,))} if place.rank == 0 else {}

    with relight.trainer(
        place.url, job="j", sync=relight.SnapshotSync(model, place.directory / "w")
    ) as trainer:
        trainer.sync(0)


class _Folder:
    """A transfer's backend for stubs: what would go over the wire lies in a folder."""

    def __init__(self, place: Place, meeting: Any, control: Any, source: Any) -> None:
        self._place = place
        self._control = control
        self._source = source
        if meeting.rank == 0:
            control.init_weight_transfer_engine({"rank_offset": 1})

    def send_weights(self) -> None:
        from safetensors.torch import save_file

        if self._place.rank:
            for _ in self._source:
                pass
            return
        self._control.start_weight_update()
        tensors: dict[str, Any] = {}
        for name, tensor in self._source:
            if name.startswith("middle") and not (self._place.directory / "mended").exists():
                raise ConnectionError("the link broke in the middle of a model")
            tensors[name] = tensor
        folder = self._place.directory / "sent"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        self._control.update_weights({"folder": str(folder)})
        self._control.finish_weight_update()

    def shutdown(self) -> None: ...


def transferred(place: Place) -> int:
    """Weights of which each rank holds a part, into an engine's memory; the first try breaks."""
    sync = relight.VllmTransferSync(
        _sharded_model(),
        timeout_s=10.0,
        open_group=lambda meeting, control, source: _Folder(place, meeting, control, source),
    )
    with relight.trainer(place.url, job="j", sync=sync) as trainer:
        trainer.sync(0)
        place.note("broken")
        until(place.directory / "mended")
        trainer.sync(1)
        return trainer.run


def waiting(place: Place) -> None:
    """Wait for a rollout that does not end."""
    with relight.trainer(place.url, job="j", rank_deadline_s=2.0) as trainer:
        trainer.wait(lambda: place.note("waits") or time.sleep(600))
