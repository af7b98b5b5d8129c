"""A verl job as a program: `verl_job.py FOLDER`, with commands on standard input, answers on standard output.

Each command is a JSON list `[id, name, argument]`, each answer a line `> [id, value]`, in whatever order. The
replicas, their workers, placement groups, load balancer, clients and the trainer's loop are verl's own; see
`verl_rig` for what is not. It ends with its standard input, and its Ray cluster with it.
"""

import asyncio
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(sys.argv[1])
os.environ["VERL_USE_EXTERNAL_MODULES"] = "relight.agents.adapters.verl"
os.environ["VERL_LOGGING_LEVEL"] = "INFO"
os.environ["RELIGHT_TEST_FOLDER"] = str(FOLDER)

import ray  # noqa: E402
import verl  # noqa: E402
from hydra import compose, initialize_config_module  # noqa: E402
from verl.checkpoint_engine import CheckpointEngineManager  # noqa: E402
from verl.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, get_trainer_cls  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.rollout import llm_server, replica  # noqa: E402
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica  # noqa: E402

from relight.agents.adapters.verl.replica import replica_class  # noqa: E402
from relight.agents.adapters.verl.session import Managed  # noqa: E402
from relight.agents.adapters.verl.trainers import separate_async  # noqa: E402
from tests import verl_rig  # noqa: E402

GIVEN_S = 240.0
"""Longest wait of the trainer for a batch: the test kills and waits for engines meanwhile."""


class StubReplica(vLLMReplica):  # type: ignore[misc]
    """verl's replica, whose servers have a stub for an engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(verl_rig.StubServer)


class Samples:
    """A replay buffer that gives a batch whenever the test says so."""

    def __init__(self) -> None:
        self.batches = 0
        self.asked = threading.Semaphore(0)
        self.given = threading.Semaphore(0)

    def sample(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.asked.release()
        assert self.given.acquire(timeout=GIVEN_S), f"no batch was given for {GIVEN_S:g} s"
        self.batches += 1
        return SimpleNamespace(tags=[{}], keys=[f"k{self.batches}"], partition_id="train", extra_info={}), {}


class Loop(PPOTrainerSeparateAsync.__mro__[1]):  # type: ignore[misc] # verl's own, under relight's subclass
    """verl's trainer, whose model is that of `StubActor`; what it computes of a batch is nothing."""

    def __init__(self, config: Any, actors: Any, manager: Any) -> None:
        self.config = config
        self.actor_rollout_wg = actors
        self.standalone_server_manager = manager
        self.parameter_sync_step = 2
        self.global_steps = 0
        self.use_reference_policy = self.use_critic = False
        self.hybrid_rollout_config = SimpleNamespace(enable_switch=False)
        self.current_mode = None
        self.prev_step_profile = False
        self._enable_hybrid_replicas = False
        self.replay_buffer = Samples()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        transfer = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        own = CheckpointEngineManager(transfer, actors, manager.get_replicas())
        self.standalone_checkpoint_manager = Managed(own, config.actor_rollout_ref.rollout)

    def prepare_step(self) -> dict[str, Any]:
        return {}

    def _balance_batch(self, batch: Any, metrics: Any) -> Any:
        return batch

    _compute_old_log_prob = _compute_advantage = _balance_batch

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        self.actor_rollout_wg.train()
        return batch

    def run(self, steps: int) -> None:
        """As verl's `fit` goes from step to step."""
        for _ in range(steps):
            self.global_steps += 1
            self.timing_raw: dict[str, Any] = {}
            self.on_step_begin()
            self.step({}, self.timing_raw)
            self.on_step_end()


class Job:
    """The commands."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.manager: Any = None
        self.trainer: Any = None
        self.clients: dict[str, Any] = {}
        self.replica = replica.RolloutReplicaRegistry.get("vllm").__module__

    async def begin(self, _: Any) -> Any:
        self.manager = await llm_server.LLMServerManager.create(config=self.config)
        self.clients["plain"] = self.manager.get_client()
        self.clients["fully"] = self.manager.get_client(client_cls=llm_server.FullyAsyncLLMServerClient)
        return await self.seen(None)

    async def seen(self, _: Any) -> Any:
        """What verl holds of each replica, and the cluster of all."""
        replicas = []
        for each in self.manager.get_replicas():
            (server,) = each.servers
            replicas.append(
                {
                    "engine": await server.relight_engine.remote(),
                    "incarnation": await server.relight_incarnation.remote(),
                    "address": await server.get_server_address.remote(),
                    "aborted": await server.how_often_aborted.remote(),
                    "workers": [worker._actor_id.hex() for worker in each.workers],
                }
            )
        groups = [name for name, one in ray.util.placement_group_table().items() if one["state"] == "CREATED"]
        return {"replicas": replicas, "placement_groups": sorted(groups)}

    async def balancer(self, call: Any) -> Any:
        name, *arguments = call
        answer = await getattr(self.manager.global_load_balancer, name).remote(*arguments)
        return [answer[0], repr(answer[1])] if name == "acquire_server" else answer

    async def generate(self, asked: Any) -> Any:
        client, prompt, tokens = asked
        answer = await self.clients[client].generate(
            f"session-{prompt}", prompt_ids=prompt, sampling_params={"max_tokens": tokens, "temperature": 0.0}
        )
        return json.loads(answer.model_dump_json())

    async def trainer_begins(self, _: Any) -> Any:
        pool = RayResourcePool([1], use_gpu=True, max_colocate_count=2)
        made = RayClassWithInitArgs(cls=ray.remote(verl_rig.StubActor))
        actors = await asyncio.to_thread(
            RayWorkerGroup, resource_pool=pool, ray_cls_with_init=made, device_name="cuda"
        )
        trainer_class = separate_async(Loop)
        self.trainer = await asyncio.to_thread(_made, trainer_class, Loop, self.config, actors, self.manager)
        await asyncio.to_thread(self.trainer.on_init_end)
        return self.trainer.relight._trainer.run

    async def train(self, steps: Any) -> Any:
        await asyncio.to_thread(self.trainer.run, steps)
        return self.trainer.global_steps

    async def sampling(self, _: Any) -> Any:
        """Return once the trainer waits for samples."""
        return await asyncio.to_thread(self.trainer.replay_buffer.asked.acquire, True, 60)

    async def sampled(self, _: Any) -> Any:
        self.trainer.replay_buffer.given.release()
        return True

    async def groups(self, _: Any) -> Any:
        """Sizes of the groups that weights went through, one for each sync."""
        return self.trainer.actor_rollout_wg.sizes_of_groups()[0]

    async def refused(self, how: Any) -> Any:
        one = self.manager.get_replicas()[0]
        try:
            await getattr(one, how)(None)
        except verl_error() as error:
            return str(error)
        return None

    async def finish(self, _: Any) -> Any:
        await asyncio.to_thread(self.trainer.standalone_checkpoint_manager.finish, None)
        return True

    async def taken(self, _: Any) -> Any:
        """Which of verl's names are relight's."""
        return {
            "trainer": get_trainer_cls("separate_async").__mro__[0].__module__,
            "manager": llm_server.LLMServerManager.__module__,
            "replica": self.replica,
            "verl": verl.__version__,
        }


def verl_error() -> type[Exception]:
    from relight.events.errors import UsageError

    return UsageError


def _made(trainer_class: Any, base: Any, *given: Any) -> Any:
    trainer = trainer_class.__new__(trainer_class)
    base.__init__(trainer, *given)
    return trainer


def config_of() -> Any:
    asked = json.loads((FOLDER / "overrides.json").read_text())
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=asked)


def say(number: int, value: object) -> None:
    os.write(1, f"\n> {json.dumps([number, value])}\n".encode())


async def answer(job: Job, number: int, name: str, argument: Any) -> None:
    try:
        say(number, await getattr(job, name)(argument))
    except Exception as error:  # noqa: BLE001 -- told to the test
        traceback.print_exc()
        say(number, {"error": f"{type(error).__name__}: {error}"})


async def main() -> None:
    ray.init(
        num_cpus=64,
        num_gpus=3,
        include_dashboard=False,
        _temp_dir=str(FOLDER / "r"),
        object_store_memory=100_000_000,
        log_to_driver=True,
    )
    try:
        job = Job(config_of())
        replica.RolloutReplicaRegistry.register("vllm", lambda: replica_class(StubReplica))
        lines = asyncio.get_running_loop()
        tasks = set()
        while line := await lines.run_in_executor(None, sys.stdin.readline):
            task = asyncio.create_task(answer(job, *json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
