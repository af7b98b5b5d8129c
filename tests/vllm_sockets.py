"""A weight-transfer backend for vLLM on CPU: tensors go from memory to memory over sockets.

It has the form of vLLM's NCCL backend (a rendezvous that both sides enter, and a broadcast that blocks until
every worker takes part), so that what drives NCCL is driven here. vLLM finds `register` by an entry point.
"""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

BACKEND = "relight_sockets"
WITHIN_S = 20.0


@dataclass
class InitInfo(base.WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class TrainerInitInfo(base.TrainerInitInfo):
    backend: ClassVar[str] = BACKEND
    master_address: str
    master_port: int
    world_size: int


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Worker(base.WeightTransferEngine[InitInfo, UpdateInfo]):
    """In an engine's worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _trainer: socket.socket | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        deadline = time.monotonic() + WITHIN_S
        while True:
            try:
                address = (init_info.master_address, init_info.master_port)
                self._trainer = socket.create_connection(address, timeout=WITHIN_S)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        rank = init_info.rank_offset + self.parallel_config.rank
        self._trainer.sendall(rank.to_bytes(4, "little"))

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        assert self._trainer is not None
        for name, dtype_name, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes, strict=True
        ):
            weight = torch.empty(shape, dtype=getattr(torch, dtype_name))
            into = memoryview(weight.view(-1).view(torch.uint8).numpy())
            while into.nbytes:
                count = self._trainer.recv_into(into)
                if not count:
                    raise ConnectionError("the trainer has left")
                into = into[count:]
            self.model.load_weights([(name, weight)])

    def shutdown(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


class Trainer(base.TrainerWeightTransferEngine[TrainerInitInfo]):
    """In the trainer."""

    init_info_cls = TrainerInitInfo
    workers: list[socket.socket]

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInitInfo, *, client: Any, source: "base.WeightSource | None" = None
    ) -> Self:
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        made.workers = []
        if not made.is_sender:
            return made
        info = InitInfo(init_info.master_address, init_info.master_port, 1, init_info.world_size)
        with socket.create_server(("", init_info.master_port)) as server, ThreadPoolExecutor(1) as pool:
            server.settimeout(WITHIN_S)
            asked = pool.submit(client.init_weight_transfer_engine, asdict(info))
            ranks = []
            for _ in range(init_info.world_size - 1):
                worker, _address = server.accept()
                worker.settimeout(WITHIN_S)
                ranks.append(int.from_bytes(worker.recv(4), "little"))
                made.workers.append(worker)
            asked.result()
        assert sorted(ranks) == list(range(1, init_info.world_size)), ranks
        return made

    def send_weights(self) -> None:
        assert self.source is not None
        meta = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        info = UpdateInfo(
            [one.name for one in meta],
            [str(one.dtype).removeprefix("torch.") for one in meta],
            [list(one.shape) for one in meta],
        )
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.client.update_weights, asdict(info))
            for data in self._bytes():
                for worker in self.workers:
                    worker.sendall(data)
            asked.result()
        self.client.finish_weight_update()

    def _bytes(self) -> Iterator[memoryview]:
        assert self.source is not None
        for _name, tensor in self.source:
            yield memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []


def register() -> None:
    """Make the backend known in this process; vLLM calls it in each of an engine's."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, Worker)
        WeightTransferTrainerFactory.register_engine(BACKEND, Trainer)


def plugin(directory: Path) -> str:
    """A PYTHONPATH under which vLLM finds `register`."""
    about = directory / "relight_test_transport-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: relight-test-transport\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrelight_sockets = tests.vllm_sockets:register\n"
    )
    root = Path(__file__).parent.parent
    return f"{directory}:{root}"
