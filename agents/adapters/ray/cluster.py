"""A job in a Ray cluster, from a driver: reserved and begun, looked at, ended until nothing of it is left."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relight.agents.adapters.ray import host, names, tending
from relight.agents.adapters.ray.holder import Held
from relight.agents.adapters.ray.jobfile import NODE_ID, JobFile, shown
from relight.agents.adapters.ray.names import api
from relight.agents.adapters.ray.overseer import Overseer
from relight.agents.node import proc
from relight.agents.node.proc import Liveness
from relight.events import codec
from relight.events.errors import RelightError, UsageError

ASK_S = 10.0
"""For one answer of an actor that is up."""
END_S = 2.0
"""For the holders to hear that no agent is to be started any more."""
POLL_S = 0.1
GONE_S = 30.0
"""For Ray to have removed actors and the placement group that it was told to."""


class NotAnswered(RelightError):
    """An actor, or the cluster, gives no answer."""


def connect(file: JobFile) -> None:
    """Be a driver in the cluster that `file` names; raises UsageError."""
    try:
        ray = api()
    except ImportError as error:
        raise UsageError("Ray is not installed here: pip install 'relight[ray]'") from error
    try:
        ray.init(
            address=file.ray.address,
            namespace=file.ray.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"no Ray cluster is reached at {file.ray.address!r}: {error}") from error


def leave() -> None:
    """Be no driver any more; what is detached lives on."""
    ray = api()
    ray.shutdown()


def reserve(file: JobFile) -> bool:
    """Ask for the placement group; whether nothing of the job was there before.

    Raises UsageError where the job stands there by another file.
    """
    spec = codec.to_json(file)
    there = _overseer(file)
    if there is not None and _answer(there.spec.remote(), "the overseer") != spec:
        raise UsageError(
            f"job {file.job} stands in this cluster by another file: `relight ray down` ends it first"
        )
    if names.group_of(file) is not None:
        return False
    names.reserve(file)
    return there is None


def oversee(file: JobFile, *, bus_url: str) -> None:
    """Start the overseer, unless there is one."""
    ray = api()
    remote: Any = ray.remote(Overseer)
    remote.options(
        name=names.overseer(file),
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=4,
        num_cpus=0,
        get_if_exists=True,
    ).remote(codec.to_json(file), bus_url)


def _overseer(file: JobFile) -> Any:
    ray = api()
    try:
        return ray.get_actor(names.overseer(file))
    except ValueError:
        return None


def _answer(reference: Any, whose: str, *, within_s: float = ASK_S) -> Any:
    """What an actor answers; raises NotAnswered."""
    ray = api()
    errors = api("ray.exceptions")
    try:
        return ray.get(reference, timeout=within_s)
    except errors.RayError as error:
        raise NotAnswered(f"{whose} does not answer: {names.reason(error)}") from error


def is_reserved(file: JobFile) -> bool:
    """Whether every bundle has its resources."""
    ray = api()
    group = names.group_of(file)
    return group is not None and ray.util.placement_group_table(group)["state"] == "CREATED"


def view(file: JobFile) -> list[Held]:
    """What stands in each bundle, as its holder last told. Raises NotAnswered."""
    there = _overseer(file)
    if there is None:
        return []
    return [Held(*held) for held in _answer(there.view.remote(), "the overseer")]


def lacking(file: JobFile) -> str:
    """What the cluster has too little of for the placement group, for people."""
    return shortage(file, _free())


def shortage(file: JobFile, free: list[dict[str, float]]) -> str:
    """The same, of what each node has free."""
    need, count = dict(file.ray.resources), file.all_bundles
    if file.ray.strategy == "STRICT_PACK":
        need, count = {name: amount * count for name, amount in need.items()}, 1
    spread = file.ray.strategy == "STRICT_SPREAD"
    fits = [int(min(node.get(name, 0.0) // amount for name, amount in need.items())) for node in free]
    have = sum(min(fit, 1) if spread else fit for fit in fits)
    short = {name: need[name] for name in need if not any(node.get(name, 0.0) >= need[name] for node in free)}
    text = f"no node with {shown(short or need)} free"
    return text if have == 0 else f"{have} of {count} bundles fit, and for the others there is {text}"


def _free() -> list[dict[str, float]]:
    """What each living node has free."""
    ray = api()
    state = api("ray._private.state")  # no public call tells it

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return [dict(free) for node, free in state.available_resources_per_node().items() if node in alive]


def clear(file: JobFile, *, bus_url: str, within_s: float) -> list[str]:
    """End everything of the job that this cluster can reach; what could not be ended, in words."""
    problems = _end_agents(file, bus_url=bus_url, within_s=within_s)
    if problems:
        return problems
    _remove(file)
    return _end_agents(file, bus_url=bus_url, within_s=within_s)  # of a holder that was just being made


def _end_agents(file: JobFile, *, bus_url: str, within_s: float) -> list[str]:
    """Nobody starts any agent again, and every node ends those that it has."""
    ray = api()
    errors = api("ray.exceptions")
    if (there := _overseer(file)) is not None:
        ray.kill(there, no_restart=True)
    handles = [handle for name in names.actors(file) if (handle := _actor(name)) is not None]
    told = [handle.end.remote() for handle in handles if _is_holder(handle)]
    if told:
        ray.wait(told, num_returns=len(told), timeout=END_S)  # one that has no place yet never answers
    spec = codec.to_json(file)
    problems: list[str] = []
    asked = {_sweep_on(node, spec, bus_url, within_s): node for node in _nodes()}
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=within_s + ASK_S)
    for answer in ready:
        try:
            problems += ray.get(answer)
        except errors.RayError as error:
            problems.append(f"Ray node {asked[answer]} does not answer: {names.reason(error)}")
    problems += [f"Ray node {asked[answer]} gives no answer within {within_s:g} s" for answer in late]
    return problems


def _actor(name: str) -> Any:
    ray = api()
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _is_holder(handle: Any) -> bool:
    """Whether it can be told to start no agent any more."""
    return hasattr(handle, "end")


def _nodes() -> list[str]:
    ray = api()
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _sweep_on(node: str, spec: str, bus_url: str, within_s: float) -> Any:
    ray = api()
    strategies = api("ray.util.scheduling_strategies")
    remote: Any = ray.remote(sweep)
    where = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    options = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=where)
    return options.remote(spec, node, bus_url, within_s)


def sweep(spec: str, ray_node: str, bus_url: str, within_s: float) -> list[str]:
    """On one node: end its agents of the job, and what those of lost raylets left on this machine."""
    file = codec.from_json(spec, JobFile)
    base = Path(file.state_dir).expanduser() / file.job
    problems: list[str] = []
    deadline = time.monotonic() + within_s
    for folder in _folders(base, ray_node):
        try:
            tending.end(folder, bus_url=bus_url, within_s=max(1.0, deadline - time.monotonic()))
        except (RelightError, OSError) as error:
            problems.append(str(error))
    return problems


def _folders(base: Path, ray_node: str) -> Iterator[Path]:
    for folder in sorted(base.iterdir()) if base.is_dir() else ():
        known = host.read(folder) if folder.is_dir() else None
        mine = folder.name.endswith(ray_node[:NODE_ID])
        if (known and (mine or proc.liveness(known.raylet) is Liveness.DEAD)) or (
            mine and (folder / host.FILE).exists()
        ):
            yield folder


def _remove(file: JobFile) -> None:
    """The actors and the placement group. Raises NotAnswered where Ray has not done it in time."""
    ray = api()
    for name in names.actors(file):
        if (handle := _actor(name)) is not None:
            ray.kill(handle, no_restart=True)
    if (group := names.group_of(file)) is not None:
        ray.util.remove_placement_group(group)
    deadline = time.monotonic() + GONE_S
    while (still := names.actors(file)) or names.group_of(file) is not None:
        if time.monotonic() >= deadline:
            raise NotAnswered(f"Ray has not removed {', '.join(still) or names.group(file)} yet")
        time.sleep(POLL_S)


def lost(held: list[Held]) -> list[Held]:
    """Those whose Ray node is gone: what ran there cannot be asked."""
    alive = set(_nodes())
    return [each for each in held if each.ray_node and each.ray_node not in alive]
