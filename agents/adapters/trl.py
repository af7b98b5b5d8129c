"""TRL's AsyncGRPO trainer: what stands at its `weight_transfer=` instead of its NCCL client.

TRL pauses one server, streams the policy into it and resumes it, at every sync and on rank 0 alone. Here the
same stream becomes a snapshot of the job, engines pull it, and the call returns when each of them was routed
with it. Between two syncs the last snapshot is what recoveries are given, so none of them waits for a step:
the parameters, which the optimizer may be changing, are never looked at outside a sync.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from relight.agents.snapshot import SnapshotError
from relight.agents.trainer.api import Trainer
from relight.agents.trainer.session import trainer
from relight.agents.trainer.snapshot import SnapshotSync
from relight.events.errors import UsageError

Stream = Iterator[tuple[str, Any]]
"""Names of the base checkpoint, and torch tensors."""

NO_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")


class WeightTransfer:
    """TRL's `WeightTransferProtocol`. Made by `weight_transfer`.

    A session begins with the training and ends with it, cleanly where nothing was raised; a second `train()`
    is a new run. Every rank may hold the stream open in a collective, so it is taken to its end at once.
    """

    def __init__(
        self,
        url: str | None,
        *,
        job: str,
        snapshots: Callable[[Callable[[], Mapping[str, Any]]], SnapshotSync],
        step: Callable[[], int] | None,
        session: Mapping[str, Any],
    ) -> None:
        self._sync = snapshots(self._taken)
        self._url = url
        self._job = job
        self._options = dict(session)
        self._step = step
        self._syncs = 0
        self._weights: dict[str, Any] = {}
        """Those of the sync that is running, in host memory."""
        self._session: Trainer | None = None
        self._between = ExitStack()
        self._handled: BaseException | None = None
        """What was being handled as the session began, and is none of its own."""

    # --- what TRL calls ----------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Begin the session. Raises BusUnavailable, UsageError."""
        self._opened()

    def pause(self) -> None:
        """Close the boundary; engines are paused by their agents, each for its own load."""
        self._between.close()

    def send_weights(self, iterator: Stream) -> None:
        """Hand `iterator` over to every engine. Raises SnapshotError, OrchestratorLost, Superseded."""
        self._weights = {name: tensor.detach().cpu() for name, tensor in iterator}
        try:
            self._opened().sync(self._step() if self._step else self._syncs)
        finally:
            self._weights = {}
        self._syncs += 1

    def resume(self) -> None:
        """Open a boundary in which recoveries are given the snapshot that stands."""
        session = self._opened()
        step = self._step() if self._step else self._syncs - 1
        self._between.enter_context(session.boundary(step))

    def destroy(self) -> None:
        """End the session; the job is finished where no exception ends the training."""
        session, self._session = self._session, None
        if session is None:
            return
        error = sys.exception()
        if error is self._handled:
            error = None
        try:
            self._between.close()
        finally:
            session.__exit__(type(error) if error else None, error, None)

    # -----------------------------------------------------------------------------------------------

    def _opened(self) -> Trainer:
        if self._session is None:
            self._handled = sys.exception()
            self._session = self._began().__enter__()
        return self._session

    def _began(self) -> Trainer:
        return trainer(self._url, job=self._job, sync=self._sync, ranks="one", **self._options)

    def _taken(self) -> Mapping[str, Any]:
        if not self._weights:
            raise SnapshotError("the last sync's snapshot is not whole; the next sync writes its own")
        return self._weights


def weight_transfer(  # noqa: PLR0913 -- a public signature
    url: str | None = None,
    *,
    job: str,
    directory: str | os.PathLike[str],
    model: str,
    step: Callable[[], int] | None = None,
    keep: int = 2,
    shared: bool | None = None,
    **session: Any,
) -> WeightTransfer | None:
    """What `AsyncGRPOTrainer(weight_transfer=…)` is given: weights go to the engines of `job` by snapshots.

    `url`: the bus (none: RELIGHT_BUS_URL). `directory`: a place that every engine's agent reaches. `model`:
    what the trainer is given as its model; its config and tokenizer stand beside the weights. `step`: the
    trainer's step, by which versions are named; none counts syncs. `keep`, `shared`: those of SnapshotSync;
    `session`: those of `relight.trainer`. With RELIGHT_DISABLE=1 there is none, and TRL uses its own client.
    Raises UsageError where `model` is neither a directory nor in the hub's cache.
    """
    if os.environ.get("RELIGHT_DISABLE") == "1":
        return None
    sides = _sides(model)

    def snapshots(weights: Callable[[], Mapping[str, Any]]) -> SnapshotSync:
        return SnapshotSync(weights, directory, keep=keep, shared=shared, config=sides)

    return WeightTransfer(url, job=job, snapshots=snapshots, step=step, session=session)


def _sides(model: str) -> Path:
    """Where config and tokenizer of `model` lie, as files."""
    if Path(model).is_dir():
        return Path(model)
    try:
        hub: Any = import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, ignore_patterns=list(NO_WEIGHTS)))
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(
            f"model={model!r} is no directory, and the hub does not give it: {error}; load it once where this"
            " runs, or give its directory"
        ) from error
