"""A replica's bundles: where each incarnation of its engine is started, one like the other.

The bundles are held by verl's own workers, one a device, for as long as the job lives. A new incarnation is
an actor on their node with their devices; their cached handles and sockets of the last one are cleared first.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relight.agents.adapters.verl.ledger import Kept
from relight.agents.adapters.verl.server import Place
from relight.agents.adapters.verl.theirs import theirs
from relight.agents.node.delegated.application import Order
from relight.events.errors import RelightError

LOOK_S = 0.2
"""Between two looks whether the agent still wants what is being started."""
RENEW_S = 60.0
"""For a worker to drop what it holds of the last incarnation; it does nothing else then."""
CONCURRENCY = 16
"""Calls beside generations, as many as verl reckons with."""


class StartWithdrawn(RelightError):
    """The agent does not want it any more."""


@dataclass(slots=True, eq=False)
class Life:
    """One incarnation that runs."""

    incarnation: int
    server: Any
    pid: int
    host: str
    port: int
    ledger: Path
    steps: int | None = None
    """verl's number of the weights that it has."""
    kept: "asyncio.Future[dict[str, Kept]] | None" = None
    """What it had made when it died, once somebody asks."""
    died: bool = False
    """A call has met its death."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """The agent has proven it, so the orchestrator has taken its route away."""


class Bundle:
    """Of one replica."""

    def __init__(self, server: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """`server`, the class of server actors, is made with `args` and `kwargs`."""
        self._server = server
        self._args = args
        self._kwargs = dict(kwargs)
        self.config = kwargs["config"]
        self.failure = ""
        """Of the last start, for whoever waits."""

    def start(self, order: Order, *, ledger: Path) -> Life:
        """A new incarnation, serving. Raises whatever keeps it from that, with nothing of it left running."""
        deadline = time.monotonic() + order.within_s
        try:
            self._renew_workers()
            server = self._actor(order, ledger)
            try:
                pid = _result(server.relight_pid.remote(), order, deadline)
                _result(server.launch_server.remote(), order, deadline)
                host, port = _result(server.get_server_address.remote(), order, deadline)
            except BaseException:
                theirs("ray").kill(server, no_restart=True)
                raise
        except Exception as error:
            self.failure = f"Its last start failed: {type(error).__name__}: {error}"
            raise
        self.failure = ""
        return Life(order.incarnation, server, pid, host, port, ledger)

    def _actor(self, order: Order, ledger: Path) -> Any:
        ray = theirs("ray")
        affinity = theirs("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        me = ray.get_runtime_context()
        actor = ray.remote(self._server).options(
            name=f"{me.get_actor_name()}.{order.incarnation}",
            scheduling_strategy=affinity(node_id=me.get_node_id(), soft=False),
            runtime_env={"env_vars": {**self._inherited(), **order.marks}},
            max_concurrency=max(1000, self.config.max_num_seqs + CONCURRENCY),
            max_restarts=0,
            max_task_retries=0,
        )
        return actor.remote(*self._args, **self._kwargs, relight=Place(order.port, str(ledger)))

    def _inherited(self) -> dict[str, str]:
        """What verl gave to the actor that it takes for its server."""
        given: Mapping[str, str] = theirs("ray").get_runtime_context().runtime_env.get("env_vars") or {}
        return dict(given)

    def _renew_workers(self) -> None:
        ray = theirs("ray")
        workers = self._kwargs["workers"]
        try:
            ray.get([worker.relight_renew.remote() for worker in workers], timeout=RENEW_S)
        except ray.exceptions.RayActorError as error:
            raise RelightError(
                f"a worker that holds this replica's devices has died; verl makes them once a job: {error}"
            ) from error


def _result(ref: Any, order: Order, deadline: float) -> Any:
    ray = theirs("ray")
    while True:
        left_s = deadline - time.monotonic()
        ready, _ = ray.wait([ref], timeout=max(0.0, min(LOOK_S, left_s)))
        if ready:
            return ray.get(ref)
        if order.withdrawn.is_set():
            raise StartWithdrawn("the agent has withdrawn its order")
        if left_s <= 0:
            raise TimeoutError(f"not up within {order.within_s:.0f} s")
