"""verl 0.9: rollout engines that come back while the job trains, by verl's own plug points and no fork of it.

`VERL_USE_EXTERNAL_MODULES=relight.agents.adapters.verl` has verl import this in each of its processes; a few
of verl's classes are then replaced by subclasses as their modules are imported (`takeover` lists them). The
router's YAML file holds the settings. Theory: what verl holds on to (replica, server name, actor handle) is
a `steward`, one long-lived actor a replica; behind it each incarnation of the engine is an actor of its own.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relight.agents.adapters.verl.balancer import LoadBalancer as LoadBalancer

VARIABLE = "VERL_USE_EXTERNAL_MODULES"
"""In which verl is told to import this."""


def __getattr__(name: str) -> Any:
    if name == "LoadBalancer":
        from relight.agents.adapters.verl.balancer import LoadBalancer

        return LoadBalancer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ in os.environ.get(VARIABLE, "").split(","):
    from relight.agents.adapters.verl.takeover import begin

    begin()
