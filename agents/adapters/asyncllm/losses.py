"""What an error of a call to an actor says of the engine in it. Pure: knows Ray's and vLLM's errors by name.

Ray raises what a method raised as an error of two classes, its own and the method's, or, where the caller
cannot read the method's, as its own alone with the text of the other in it.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, cast


class Loss(StrEnum):
    """What is lost."""

    ENGINE = "engine"
    """The engine's core is dead (vLLM's EngineDeadError). The actor lives, and will never generate again."""
    ACTOR = "actor"
    """The actor itself is dead (Ray's ActorDiedError): its process has ended, or its node has."""
    AWAY = "away"
    """Ray cannot reach it at the moment (ActorUnavailableError, GetTimeoutError): it may well live."""


_NAMES = {
    "vllm.EngineDeadError": Loss.ENGINE,
    "ray.ActorUnavailableError": Loss.AWAY,
    "ray.GetTimeoutError": Loss.AWAY,
    "ray.LocalRayletDiedError": Loss.AWAY,
    "ray.RpcError": Loss.AWAY,
    "ray.RayActorError": Loss.ACTOR,
    "ray.ActorUnschedulableError": Loss.ACTOR,
    "ray.ActorPlacementGroupRemoved": Loss.ACTOR,
    "ray.ActorHandleNotFoundError": Loss.ACTOR,
    "ray.NodeDiedError": Loss.ACTOR,
    "ray.OwnerDiedError": Loss.ACTOR,
    "ray.WorkerCrashedError": Loss.ACTOR,
}
"""By package and class; ActorDiedError is a RayActorError. A subclass is found before its base."""
_IN_TEXT = "vllm.v1.engine.exceptions.EngineDeadError"


def loss_of(error: BaseException) -> Loss | None:
    """What is lost with `error`; None where it says nothing of the engine: the call itself was wrong."""
    for each in _chain(error):
        for base in type(each).__mro__:
            if loss := _NAMES.get(f"{base.__module__.partition('.')[0]}.{base.__name__}"):
                return loss
        last = str(getattr(each, "traceback_str", "")).rstrip().rpartition("\n")[2]
        if last.startswith(_IN_TEXT):
            return Loss.ENGINE
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, those in it, and what caused each."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop(0)
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [getattr(each, "cause", None), each.__cause__]
        if isinstance(each, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", each).exceptions
