"""A verl job on one CPU: verl's own replicas, workers, groups and checkpoint manager; a stub engine.

Imported by the processes of the job (`tests/verl_job.py` drives it), never by pytest: verl and Ray warn as
they are imported. What is put in the place of verl's own: vLLM's engine (a process that speaks its HTTP API),
the transport of weights (a folder instead of NCCL), the trainer's model (two tensors).
"""

import asyncio
import copy
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import ray
import torch
from safetensors.numpy import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import TokenOutput

STUB = "RELIGHT_TEST_STUB"
"""Variable with the stub's model folder."""
FOLDER = "RELIGHT_TEST_FOLDER"
"""Variable with the job's own folder, in which it notes its faults and moves its weights."""


class CoreDead(Exception):
    """What this engine raises once it is dead."""


class StubEngine:
    """What verl's server asks of AsyncLLM, over the HTTP of a stub."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.fed: asyncio.Event | None = None

    async def generate(
        self, *, prompt: Any, sampling_params: dict[str, Any], request_id: str
    ) -> AsyncIterator[Any]:
        body = {
            "token_ids": prompt,
            "sampling_params": sampling_params,
            "request_id": request_id,
            "stream": True,
        }
        made = SimpleNamespace(token_ids=[], logprobs=[], finish_reason=None)
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{self._url}/inference/v1/generate", json=body) as answer,
            ):
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    told = json.loads(line[6:])
                    if "error" in told:
                        raise CoreDead(told["error"])
                    choice = told["choices"][0]
                    made = copy.copy(made)
                    made.token_ids = made.token_ids + choice["token_ids"]
                    made.logprobs = made.logprobs + [
                        {each["token_id"]: SimpleNamespace(logprob=each["logprob"])}
                        for each in (choice["logprobs"] or {"content": []})["content"]
                    ]
                    made.finish_reason = choice["finish_reason"]
                    yield SimpleNamespace(outputs=[made])
        except aiohttp.ClientError as error:
            raise CoreDead(str(error)) from error
        if made.finish_reason is None:
            raise CoreDead("the stream ended without a finish")

    async def call(self, path: str, body: object = None) -> Any:
        async with aiohttp.ClientSession() as http, http.post(self._url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()


class StubServer:
    """The part of verl's vLLMHttpServer that its replica, its workers and its clients call."""

    DEATHS = (CoreDead,)

    def __init__(self, **given: Any) -> None:
        self.config = given["config"]
        self.devices = given["cuda_visible_devices"]
        self.global_steps: int | None = None
        self.aborted = 0
        self.engine: Any = None

    async def launch_server(self, **_: Any) -> None:
        command = [sys.executable, "-m", "relight.agents.stub", "--model", os.environ[STUB]]
        command += ["--host", "127.0.0.1", "--port", str(self.relight.port)]  # type: ignore[attr-defined]
        command += ["--token-interval-ms", "20"]
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{self.relight.port}"  # type: ignore[attr-defined]
        while not _answers(url):
            await asyncio.sleep(0.02)
        self.engine = StubEngine(url)

    async def get_server_address(self) -> tuple[str, int]:
        return "127.0.0.1", self.relight.port  # type: ignore[attr-defined]

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        asked = {**sampling_params, "logprobs": 0}
        final: Any = None
        async for output in self.engine.generate(
            prompt=prompt_ids, sampling_params=asked, request_id=request_id
        ):
            final = output
        extra = {"global_steps": self.global_steps, "devices": self.devices}
        if not final.outputs:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=extra)
        made = final.outputs[0]
        scores = [each[token].logprob for token, each in zip(made.token_ids, made.logprobs, strict=True)]
        stop = "aborted" if made.finish_reason == "abort" else "completed"
        return TokenOutput(token_ids=made.token_ids, log_probs=scores, stop_reason=stop, extra_fields=extra)

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        self.aborted += 1
        await self.engine.call("/pause?mode=abort")
        return {"aborted_count": 0, "request_ids": []}

    async def how_often_aborted(self) -> int:
        return self.aborted

    async def resume_engine_generation(self) -> None:
        await self.engine.call("/resume")

    async def open_submission_gate(self) -> None:
        """The stub has none."""

    async def wait_for_requests_to_drain(self) -> None:
        """An abort has ended them."""

    async def release_kv_cache(self) -> None:
        """The stub has none."""

    async def resume_kv_cache(self) -> None:
        """The stub has none."""

    async def clear_kv_cache(self) -> None:
        await self.engine.call("/reset_prefix_cache")

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def collective_rpc(self, method: str, **given: Any) -> None:
        await self.engine.call("/collective_rpc", {"method": method, "kwargs": given.get("kwargs") or {}})


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class StubAdapter(BaseRollout):  # type: ignore[misc]
    """In the place of verl's vLLM adapter: it finds its server by verl's name, and loads from a folder."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        self.config = config
        self.replica_rank = replica_rank
        self.server_handle: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing is."""

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        if self.server_handle is None:
            self.server_handle = ray.get_actor(f"vllm_server_{self.replica_rank}_0")
        folder = Path(tempfile.mkdtemp(prefix="weights-", dir=os.environ[FOLDER]))
        arrays: dict[str, Any] = {}
        async for name, tensor in weights:
            arrays[name] = tensor.numpy()
            if fault("adapter", self.replica_rank):
                raise TimeoutError("the engine reads no bucket")
        save_file(arrays, folder / "model.safetensors")
        base = Path(os.environ[STUB])
        (folder / "config.json").write_text((base / "config.json").read_text())
        await self.server_handle.collective_rpc.remote("reload_weights", kwargs={"weights_path": str(folder)})
        await self.server_handle.clear_kv_cache.remote()
        await self.server_handle.set_global_steps.remote(global_steps)


def fault(kind: str, rank: int) -> bool:
    """Whether this fault is to strike there."""
    return (Path(os.environ[FOLDER]) / f"{kind}-{rank}").exists()


_ROLLOUT_REGISTRY[("vllm", "async")] = "tests.verl_rig.StubAdapter"


@CheckpointEngineRegistry.register("folder")
class FolderEngine(CheckpointEngine):  # type: ignore[misc]
    """A transport by files, with a group that knows who is in it."""

    def __init__(self, bucket_size: int, is_master: bool = False, rebuild_group: bool = False) -> None:
        self.rebuild_group = rebuild_group
        self.is_master = is_master
        self.group: dict[str, Any] | None = None

    def prepare(self) -> dict[str, Any]:
        return {"folder": tempfile.mkdtemp(prefix="transport-", dir=os.environ[FOLDER])}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        size = actor_wg_world_size + rollout_world_size
        folder = metadata[0]["folder"]
        senders = {"folder": [folder] * actor_wg_world_size, "size": [size] * actor_wg_world_size}
        return senders, {"folder": [folder] * rollout_world_size, "size": [size] * rollout_world_size}

    def init_process_group(self, folder: str, size: int) -> None:
        assert self.group is None or not self.rebuild_group, "the last group was not taken down"
        self.group = {"folder": Path(folder), "size": size}

    def finalize(self) -> None:
        self.group = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        assert self.group is not None
        save_file({name: tensor.numpy() for name, tensor in weights}, self.group["folder"] / "new")
        (self.group["folder"] / "new").rename(self.group["folder"] / "all")

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        from safetensors.torch import load_file

        assert self.group is not None
        whole = self.group["folder"] / "all"
        while not whole.exists():
            await asyncio.sleep(0.01)
        tensors = load_file(whole)
        for name in sorted(tensors):
            yield name, tensors[name]
        (self.group["folder"] / f"received-{os.getpid()}").touch()


class StubActor(Worker):  # type: ignore[misc]
    """The trainer's side: a model of two tensors that `train` moves."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint_engine = CheckpointEngineRegistry.new("folder", bucket_size=1, is_master=True)
        self.seed = 0
        self.groups: list[int] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "init_process_group":
            self.groups.append(kwargs["size"])
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, Any]:
        await self.checkpoint_engine.send_weights(weights_of(self.seed).items(), global_steps)
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def train(self) -> int:
        self.seed += 1
        return self.seed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def sizes_of_groups(self) -> list[int]:
        return self.groups


def weights_of(seed: int) -> dict[str, Any]:
    """Those of a stub's model, decided by `seed`."""
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(rng.standard_normal((16, 8), dtype=np.float32))
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
