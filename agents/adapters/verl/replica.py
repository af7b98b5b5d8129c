"""verl's replica with a steward in the place of its server. Everything else of it is verl's own.

Replicas are copied between verl's actors; what a copy holds (workers, the steward's handle) stays right for
the job's whole life, whatever becomes of the engine.
"""

# verl's classes have no types: whatever `super()` gives is unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

from relight.agents.adapters.verl import refusals, settings
from relight.agents.adapters.verl.receiver import worker_class
from relight.agents.adapters.verl.server import server_class
from relight.agents.adapters.verl.steward import steward_class
from relight.agents.adapters.verl.theirs import theirs


def replica_class(base: Any) -> Any:
    """A subclass of verl's replica class `base`, for rollouts; reward and teacher models stay verl's."""

    class Replica(base):  # type: ignore[misc]
        """A replica whose engine is given back."""

        server_class: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.relight = not (self.is_reward_model or self.is_teacher_model)
            if self.relight:
                settings.of(self.config)
                refusals.check_replica(self)
                refusals.check_rollout(self.config)
                self.server_class = _actor(steward_class(server_class(_plain(self.server_class))))

        async def init_hybrid(self, *args: Any, **kwargs: Any) -> None:
            self._refuse("init_hybrid (a replica inside the trainer's own workers)")
            await super().init_hybrid(*args, **kwargs)

        async def init_hybrid_colocated(self, *args: Any, **kwargs: Any) -> None:
            self._refuse("init_hybrid_colocated (a replica inside the trainer's own workers)")
            await super().init_hybrid_colocated(*args, **kwargs)

        async def init_colocated(self, *args: Any, **kwargs: Any) -> None:
            self._refuse("init_colocated (a replica in the trainer's placement group)")
            await super().init_colocated(*args, **kwargs)

        def _refuse(self, how: str) -> None:
            if self.relight:
                raise refusals.colocated(how)

        def get_ray_class_with_init_args(self) -> Any:
            made = super().get_ray_class_with_init_args()
            if self.relight:
                made.cls = _actor(worker_class(_plain(made.cls)))
            return made

    Replica.__name__ = Replica.__qualname__ = base.__name__
    return Replica


def is_ours(replica: Any) -> bool:
    """Whether relight gives its engine back."""
    return bool(getattr(replica, "relight", False))


def _plain(actor: Any) -> Any:
    """The class that an actor class was made of."""
    return actor.__ray_metadata__.modified_class.__ray_actor_class__


def _actor(plain: Any) -> Any:
    return theirs("ray").remote(plain)
