"""verl's two trainers for engines of their own, with relight's session around what they do.

Each is a subclass of verl's class with its hooks: the full syncs go through the session, a boundary is open
while the trainer waits for samples or validates, and an optimizer step is told.
"""

# verl's classes have no types: whatever `super()` gives is unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import logging
import sys
from typing import Any

from relight.agents.adapters.verl import refusals
from relight.agents.adapters.verl.session import Managed
from relight.agents.adapters.verl.theirs import theirs


def separate_async(base: Any) -> Any:
    """v1's `separate_async`."""

    class SeparateAsync(base):  # type: ignore[misc]
        """verl's PPOTrainerSeparateAsync, whose engines are given back."""

        standalone_checkpoint_manager: Any

        def __init__(self, config: Any) -> None:
            refusals.check_separate(config)
            super().__init__(config)

        def _setup(self) -> None:
            # verl 0.9.1 gives its logger a `flush` there, where hybrid_engine is False; loggers take none.
            logger = logging.getLogger(base.__module__)
            level = logger.level
            logger.setLevel(logging.WARNING)
            try:
                super()._setup()
            finally:
                logger.setLevel(level)
            rollout = self.config.actor_rollout_ref.rollout
            self.standalone_checkpoint_manager = Managed(self.standalone_checkpoint_manager, rollout)

        @property
        def relight(self) -> Any:
            """The session."""
            return self.standalone_checkpoint_manager.session

        def on_sample_begin(self) -> None:
            super().on_sample_begin()
            self.relight.waiting()

        def on_sample_end(self) -> None:
            self.relight.waited()
            super().on_sample_end()

        def on_validate_begin(self) -> None:
            super().on_validate_begin()
            self.relight.waiting("eval")

        def on_validate_end(self) -> None:
            self.relight.waited()
            super().on_validate_end()

        def _update_actor(self, *args: Any, **kwargs: Any) -> Any:
            self.relight.moved()
            return super()._update_actor(*args, **kwargs)

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().fit(*args, **kwargs)
            finally:
                self.standalone_checkpoint_manager.finish(sys.exception())

    SeparateAsync.__name__ = SeparateAsync.__qualname__ = base.__name__
    return SeparateAsync


def fully_async(actor: Any) -> Any:
    """The fully-async trainer, an actor class: another one, with the same options."""
    base: Any = actor.__ray_metadata__.modified_class.__ray_actor_class__

    class FullyAsync(base):  # type: ignore[misc]
        """verl's FullyAsyncTrainer, whose engines are given back."""

        checkpoint_manager: Any

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            refusals.check_fully(config)
            super().__init__(config, *args, **kwargs)

        async def _setup_checkpoint_manager(self) -> None:
            await super()._setup_checkpoint_manager()
            rollout = self.config.actor_rollout_ref.rollout
            self.checkpoint_manager = _InLoop(
                await asyncio.to_thread(Managed, self.checkpoint_manager, rollout)
            )

        @property
        def relight(self) -> Any:
            """The session."""
            return self.checkpoint_manager.session

        async def _fit_generate(self, *args: Any, **kwargs: Any) -> Any:
            async with self.relight.boundary():
                return await super()._fit_generate(*args, **kwargs)

        async def _fit_validate(self, *args: Any, **kwargs: Any) -> None:
            if self.local_trigger_step != 1:  # verl validates behind a sync only
                return
            async with self.relight.boundary("eval"):
                await super()._fit_validate(*args, **kwargs)

        def _update_actor(self, *args: Any, **kwargs: Any) -> Any:
            self.relight.moved()
            return super()._update_actor(*args, **kwargs)

        async def fit(self) -> None:
            try:
                await super().fit()
            finally:
                await asyncio.to_thread(self.checkpoint_manager.finish, sys.exception())

    FullyAsync.__name__ = FullyAsync.__qualname__ = base.__name__
    return theirs("ray").remote(**actor._default_options)(FullyAsync)


class _InLoop:
    """A `Managed` for a trainer that awaits its syncs: they run in a thread, and its loop goes on."""

    def __init__(self, managed: Managed) -> None:
        self._managed = managed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._managed, name)

    async def update_weights(self, global_steps: int) -> dict[str, Any]:
        return await asyncio.to_thread(self._managed.update_weights, global_steps)
