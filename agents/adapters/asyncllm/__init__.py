"""vLLM's AsyncLLM inside the application's own Ray actors: `actors` starts them, `ActorClient` calls them.

An actor is one incarnation of an engine of `launcher = "delegated"`: Ray never restarts it, the node's agent
watches its processes and proves them gone, and the next incarnation is another actor in the same bundle.
"""

from relight.agents.adapters.asyncllm.client import ActorClient
from relight.agents.adapters.asyncllm.losses import Loss, loss_of
from relight.agents.adapters.asyncllm.place import Actors, Bundle, actors

__all__ = ["ActorClient", "Actors", "Bundle", "Loss", "actors", "loss_of"]
