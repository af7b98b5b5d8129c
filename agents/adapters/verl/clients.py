"""verl's clients where they do not resume: a turn whose engine died is done once more, whole.

The fully-async client with partial rollout resumes by itself. All others would hand the part that there was
to the agent loop as if it were the turn.
"""

# verl's classes have no types: whatever `super()` gives is unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import logging
import time
from typing import Any

from relight.agents.adapters.verl import answers, replica, settings

log = logging.getLogger(__name__)


def manager_class(module: Any) -> Any:
    """A subclass of the LLMServerManager in verl's `module`, whose clients replay."""
    base: Any = module.LLMServerManager

    class Manager(base):  # type: ignore[misc]
        """verl's LLMServerManager; with relight's replicas its clients outlive engines."""

        def get_client(self, client_cls: Any = None, **kwargs: Any) -> Any:
            asked = client_cls or module.LLMServerClient
            ours = any(map(replica.is_ours, self.rollout_replicas))
            return super().get_client(client_cls=client_class(module, asked) if ours else asked, **kwargs)

    Manager.__name__ = Manager.__qualname__ = base.__name__
    return Manager


def client_class(module: Any, asked: Any) -> Any:
    """`asked`, a client class of verl's `module`, with whole turns replayed where it does not resume."""

    class Whole(module.LLMServerClient):  # type: ignore[misc]
        """Replays a turn that an engine's death has cut off."""

        async def generate(self, request_id: Any, *, sampling_params: Any, **kwargs: Any) -> Any:
            if _resumes(self, module):
                return await super().generate(request_id, sampling_params=sampling_params, **kwargs)
            own = settings.of(self.config.actor_rollout_ref.rollout)
            deaths, none_since = 0, None
            while True:
                answer = await super().generate(request_id, sampling_params=dict(sampling_params), **kwargs)
                if not answers.died(answer):
                    return answer
                if answers.met_none(answer):
                    none_since = none_since or time.monotonic()
                    if time.monotonic() - none_since >= own.wait_s:
                        raise RuntimeError(
                            f"request {request_id} met no engine for {own.wait_s:g} s (wait_s), though one is"
                            " routed; `relight explain` tells what it waits for"
                        )
                    continue
                deaths, none_since = deaths + 1, None
                if deaths >= own.max_engine_failures:
                    raise RuntimeError(
                        f"request {request_id} was under way in {deaths} deaths of engines"
                        " (max_engine_failures): it may be their cause"
                    )
                log.info("a turn is replayed request=%s deaths=%d", request_id, deaths)

    # Its own calls of a plain client's generate meet `Whole`.
    bases = (Whole,) if asked is module.LLMServerClient else (asked, Whole)
    return type(asked.__name__, bases, {"__module__": __name__})


def _resumes(client: Any, module: Any) -> bool:
    """As verl's own client decides it."""
    if not isinstance(client, module.FullyAsyncLLMServerClient):
        return False
    training = getattr(client.config, "async_training", None)
    return training is None or bool(training.partial_rollout)
