"""The application's side: it starts an actor for each order of the node's agent, in the engine's own bundle.

Invariant: an actor's name has its incarnation, and Ray restarts none. So whatever Ray, the agent or this
process does when, no name ever stands for two lives, and none lives without an order.
"""

import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

from relight.agents.adapters.asyncllm.actor import EngineActor
from relight.agents.node.delegated.application import Order, Started, delegate
from relight.events.errors import RelightError, UsageError

log = logging.getLogger(__name__)

NAMESPACE = "relight"
"""Of the actors' names, in Ray."""
LOOK_S = 0.5
"""Between two looks at whether an order whose actor is not there yet was withdrawn."""


class Bundle(NamedTuple):
    """Where the actors of an engine live, one after another."""

    group: Any
    """A Ray placement group, ready or not."""
    number: int = 0
    """Which of its bundles."""
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    lifetime: Literal["detached"] | None = None
    """`detached`: it outlives this process, and the placement group must too."""


class NotHere(RelightError):
    """The actor did not come to this node in time."""


def name_of(job: str, engine: str, incarnation: int) -> str:
    """An actor's name in `NAMESPACE`."""
    return f"{job}.{engine}.{incarnation}"


@contextmanager
def actors(
    state_dir: str, bundles: Mapping[str, Bundle], *, job: str, connect_s: float = 10.0
) -> Generator["Actors"]:
    """Start actors for the agent that keeps `state_dir`, as long as the block lasts; Ray is initialised.

    `bundles` names the bundle of each engine of `launcher = "delegated"`; all of them are on this process's
    Ray node, since an agent owns the processes of its own machine. The node file's `command` holds the flags
    of `vllm serve`. Raises UsageError, and what `relight.delegate` raises.
    """
    ray = _ray()
    if not ray.is_initialized():
        raise UsageError("Ray is not initialised: call ray.init() before starting actors")
    there = Actors(ray, bundles, job)
    starts = dict.fromkeys(bundles, there.start)
    with delegate(state_dir, starts, ended=there.ended, connect_s=connect_s):
        yield there


class Actors:
    """The actors that live now, by engine."""

    def __init__(self, ray: Any, bundles: Mapping[str, Bundle], job: str) -> None:
        self._ray = ray
        self._bundles = bundles
        self._job = job
        self._node = ray.get_runtime_context().get_node_id()
        self._living: dict[str, tuple[int, Any]] = {}

    def handle(self, engine: str) -> tuple[int, Any] | None:
        """The incarnation of `engine` that was started last, with its actor's handle; None where it ended."""
        return self._living.get(engine)

    def start(self, order: Order) -> Started:
        """Create the actor of this incarnation and return once its process lives; vLLM starts in it."""
        flags = flags_of(order)
        actor = self._created(order, flags)
        try:
            pid = self._pid(actor, order)
        except BaseException:
            self._ray.kill(actor)
            raise
        self._living[order.engine] = (order.incarnation, actor)
        begun = actor.begin.remote()
        begun.future().add_done_callback(partial(self._begun, order, actor))
        return Started([pid], on_weights=order.weights is not None)

    def _created(self, order: Order, flags: list[str]) -> Any:
        bundle = self._bundles[order.engine]
        strategies: Any = import_module("ray.util.scheduling_strategies")
        here = strategies.PlacementGroupSchedulingStrategy(
            placement_group=bundle.group, placement_group_bundle_index=bundle.number
        )
        return (
            self._ray.remote(EngineActor)
            .options(
                name=name_of(self._job, order.engine, order.incarnation),
                namespace=NAMESPACE,
                lifetime=bundle.lifetime,
                num_cpus=bundle.num_cpus,
                num_gpus=bundle.num_gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=here,
                runtime_env={"env_vars": dict(order.marks)},
            )
            .remote(flags)
        )

    def _pid(self, actor: Any, order: Order) -> int:
        asked, deadline = actor.whoami.remote(), time.monotonic() + order.within_s
        while not self._ray.wait([asked], timeout=LOOK_S)[0]:
            if order.withdrawn.is_set():
                raise NotHere(f"{order.engine}.{order.incarnation} was withdrawn before its actor lived")
            if time.monotonic() > deadline:
                raise NotHere(f"no actor for {order.engine}.{order.incarnation} within {order.within_s:g} s")
        pid, node = self._ray.get(asked)
        if node != self._node:
            raise NotHere(
                f"the bundle of {order.engine} is on Ray node {node}, its agent on {self._node}:"
                " start its actors from a process there"
            )
        return int(pid)

    def _begun(self, order: Order, actor: Any, done: Any) -> None:
        """End an actor whose engine cannot start: its agent takes the end of the process as that."""
        if (error := done.exception()) is not None:
            log.warning(
                "an engine cannot start engine=%s.%d error=%s", order.engine, order.incarnation, error
            )
            self._ray.kill(actor)

    def ended(self, engine: str, incarnation: int, why: str) -> None:
        """Its agent has proven it gone; Ray may not have noticed yet, and its bundle must be free."""
        living = self._living.get(engine)
        if living is not None and living[0] == incarnation:
            del self._living[engine]
            self._ray.kill(living[1])


def flags_of(order: Order) -> list[str]:
    """Those of `vllm serve` in the order's command, its port and its weights among them."""
    words = list(order.command)
    for program in ("serve", "vllm.entrypoints.openai.api_server"):
        if program in words:
            words = words[words.index(program) + 1 :]
    given = " ".join(words)
    if "--port" not in given:
        words += ["--port", str(order.port)]
    if "--host" not in given:
        words += ["--host", "127.0.0.1"]
    if order.weights is not None and str(order.weights) not in given:
        raise UsageError(
            f"the command of {order.engine} has no {{weights}}, and is to start on {order.weights}"
        )
    return words


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise UsageError("Ray is not installed in this Python: pip install relight[ray]") from error
