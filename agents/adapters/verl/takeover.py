"""What of verl is replaced, and when: a table of its modules and what is done to each as it is imported.

verl looks these names up at each use, or copies them from modules that are imported later, so a subclass in
the place of a class is enough. Nothing is replaced that is not told here.
"""

from types import ModuleType
from typing import Any

from relight.agents.adapters.verl.arrival import Then, at_import
from relight.agents.adapters.verl.theirs import theirs

FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_trainer"


def begin() -> None:
    """From now on; once more changes nothing."""
    at_import(THENS)


def _replica(module: ModuleType) -> None:
    """The registry's own word for `vllm`: by that name verl asks for more than the replica."""
    from relight.agents.adapters.verl.replica import replica_class

    registry: Any = module.RolloutReplicaRegistry
    loader: Any = registry._registry["vllm"]  # what verl itself registered
    registry.register("vllm", lambda: replica_class(loader()))


def _servers(module: ModuleType) -> None:
    from relight.agents.adapters.verl.clients import manager_class

    taken: Any = module
    taken.LLMServerManager = manager_class(module)


def _separate(module: ModuleType) -> None:
    """`register_trainer` refuses a name that is taken, so the table itself is written."""
    from relight.agents.adapters.verl.trainers import separate_async

    taken: Any = module
    taken.PPOTrainerSeparateAsync = separate_async(taken.PPOTrainerSeparateAsync)
    registry: Any = theirs("verl.trainer.ppo.v1.trainer_base").TRAINER_REGISTRY
    registry["separate_async"] = taken.PPOTrainerSeparateAsync


def _fully(module: ModuleType) -> None:
    from relight.agents.adapters.verl.trainers import fully_async

    taken: Any = module
    taken.FullyAsyncTrainer = fully_async(taken.FullyAsyncTrainer)


THENS: dict[str, Then] = {
    "verl.workers.rollout.replica": _replica,
    "verl.workers.rollout.llm_server": _servers,
    "verl.trainer.ppo.v1.trainer_separate_async": _separate,
    FULLY_ASYNC: _fully,
}
