"""What cannot work, refused by its name in verl's config, each with what to set instead."""

import inspect
from typing import Any

from relight.agents.adapters.verl.theirs import theirs
from relight.events.errors import UsageError

COLOCATED = (
    "engines on the trainer's own devices are not given back by relight: a dead one cannot be replaced while"
    " the trainer holds its memory"
)
ROLLOUT = "actor_rollout_ref.rollout"
STALE_GROUPS = ("rebuild_group",)
"""Parameters of checkpoint engines by which a group is made anew for each sync."""


def colocated(how: str) -> UsageError:
    """For a replica that is to be started in a colocated way."""
    return UsageError(
        f"{how}: {COLOCATED}. Use trainer.v1.trainer_mode=separate_async with"
        " actor_rollout_ref.hybrid_engine=False, or the fully-async trainer, with rollout nodes of their own"
    )


def check_separate(config: Any) -> None:
    """Of v1 `separate_async`; raises UsageError."""
    if config.actor_rollout_ref.get("hybrid_engine", True):
        raise UsageError(
            f"actor_rollout_ref.hybrid_engine=True puts replicas on the training devices: {COLOCATED}."
            " Set actor_rollout_ref.hybrid_engine=False"
        )
    check_rollout(config.actor_rollout_ref.rollout)


def check_fully(config: Any) -> None:
    """Of the fully-async trainer; raises UsageError."""
    for key in ("use_trainer_do_validate", "use_dynamic_resource_scheduling"):
        if config.async_training.get(key, False):
            raise UsageError(
                f"async_training.{key}=True puts replicas on the training devices: {COLOCATED}."
                f" Set async_training.{key}=False"
            )
    check_rollout(config.actor_rollout_ref.rollout)


def check_rollout(rollout: Any) -> None:
    """Of the rollout config of either; raises UsageError."""
    if rollout.name != "vllm":
        raise UsageError(f"{ROLLOUT}.name={rollout.name}: relight gives back vLLM engines; set it to vllm")
    if rollout.disaggregation.get("enabled", False):
        raise UsageError(
            f"{ROLLOUT}.disaggregation.enabled=True: prefill and decode apart are not supported; set False"
        )
    check_transfer(rollout.checkpoint_engine)


def check_transfer(transfer: Any) -> None:
    """Of the config of the checkpoint engine; raises UsageError."""
    backend = transfer.backend
    if backend == "naive":
        raise UsageError(
            f"{ROLLOUT}.checkpoint_engine.backend=naive hands weights over inside the trainer's own devices:"
            f" {COLOCATED}. Set it to nccl (or another one between nodes)"
        )
    if backend == "delta_sharded":
        raise UsageError(
            f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded sends changes only, and a replacement needs"
            " whole weights; set it to nccl"
        )
    theirs("verl.utils.import_utils").import_external_libs(transfer.custom_backend_module or None)
    engine: Any = theirs("verl.checkpoint_engine").CheckpointEngineRegistry.get(backend)
    takes = inspect.signature(engine).parameters
    engines: Any = transfer.engine_kwargs
    given: Any = (engines.get(backend) if engines else None) or None
    for name in STALE_GROUPS:
        default = takes[name].default if name in takes else True
        if not (given.get(name, default) if given else default):
            raise UsageError(
                f"{ROLLOUT}.checkpoint_engine.engine_kwargs.{backend}.{name} is not True: a group that is"
                " built once cannot reach a replacement alone; set it to True"
            )


def check_replica(replica: Any) -> None:
    """Of a replica as verl has made it; raises UsageError."""
    if replica.nnodes > 1:
        raise UsageError(
            f"a replica of {replica.world_size} devices spans {replica.nnodes} nodes of"
            f" {replica.gpus_per_replica_node}: relight gives back replicas within one node; make"
            f" tensor_model_parallel_size times data_parallel_size at most {ROLLOUT}.n_gpus_per_node"
        )
