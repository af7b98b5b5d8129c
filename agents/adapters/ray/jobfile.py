"""The job's file: the engines of a node file, for as many nodes as there are bundles, and `[ray]`.

Whatever is wrong with it is found before anything is asked of Ray: a UsageError that names the path. What
only a node can tell, such as whether its program is there, is checked by its holder.
"""

from pathlib import Path
from typing import Literal

import msgspec

from relight.agents.node import parts
from relight.agents.node.config import DEVICES, Engine, NodeFile, Spare, checked, read
from relight.events.errors import UsageError
from relight.events.ids import EngineName, JobName, NodeName, engine_name, job_name

STATE_DIR = "~/.local/state/relight"
NODE_ID = 12
"""Digits of a Ray node's id in the name of a node of ours."""


class Ray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[ray]` table."""

    bundles: int = 1
    """How many the engines are dealt to, in turn."""
    resources: dict[str, float]
    """What each bundle holds, in Ray's words: CPU, GPU, memory (bytes), or any other."""
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = "STRICT_SPREAD"
    """How bundles lie on nodes. With others than the default two of them may be lost with one node."""
    spares: int = 0
    """Further bundles, for engines whose own are lost."""
    address: str = "auto"
    """The cluster; `auto` takes RAY_ADDRESS, or the one that runs on this machine."""
    namespace: str = "relight"
    """Where the actors' names are."""


class JobFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    job: JobName
    state_dir: str = STATE_DIR
    """A folder of each node, on a disk that outlives what runs there; `~` is the home of Ray's user. Each
    agent takes the folder JOB/NODE in it."""
    engines: tuple[Engine, ...]
    ray: Ray

    @property
    def entries(self) -> tuple[Engine, ...]:
        """One for each engine, or for each part of one."""
        return tuple(entry for engine in self.engines for entry in parts.split(engine))

    @property
    def places(self) -> int:
        """How many engines a bundle takes."""
        return len(self.entries) // self.ray.bundles

    @property
    def all_bundles(self) -> int:
        """With the spare ones."""
        return self.ray.bundles + self.ray.spares

    def dealt(self, bundle: int) -> tuple[Engine, ...]:
        """The engines whose home is this bundle."""
        return self.entries[bundle :: self.ray.bundles] if bundle < self.ray.bundles else ()


def load(path: Path) -> JobFile:
    """The job's file at `path`; raises UsageError."""
    where = f"job file {str(path)!r}"
    file = read(path, JobFile, where=where)
    _check(file, where)
    return file


def _check(file: JobFile, where: str) -> None:
    try:
        job_name(file.job)
    except UsageError as error:
        raise UsageError(f"{where}: $.job: {error}") from None
    if not file.engines:
        raise UsageError(f"{where}: $.engines is empty: there is nothing to run")
    names = [engine.name for engine in file.engines]
    for index, engine in enumerate(file.engines):
        at = f"{where}: $.engines[{index}]."
        try:
            engine_name(engine.name)
        except UsageError as error:
            raise UsageError(f"{at}name: {error}") from None
        if names.count(engine.name) > 1:
            raise UsageError(f"{at}name {engine.name!r} stands twice")
        parts.split(engine, at=at)
    _check_ray(file, f"{where}: $.ray.")


def _check_ray(file: JobFile, at: str) -> None:
    ray = file.ray
    if ray.bundles < 1:
        raise UsageError(f"{at}bundles {ray.bundles} must be 1 or more")
    if ray.spares < 0:
        raise UsageError(f"{at}spares {ray.spares} must be 0 or more")
    for name, amount in ray.resources.items():
        if not 0 < amount < float("inf"):
            raise UsageError(f"{at}resources.{name} {amount} must be above 0")
    if not ray.resources:
        raise UsageError(f"{at}resources is empty: a bundle holds something")
    if len(file.entries) % ray.bundles:
        raise UsageError(f"{at}bundles {ray.bundles} cannot take {len(file.entries)} engines evenly")
    if any(isinstance(each.parts, tuple) and len(each.parts) + 1 > ray.bundles for each in file.engines):
        raise UsageError(f"{at}bundles {ray.bundles} are fewer than the parts of one engine")
    gpus = ray.resources.get("GPU", 0.0)
    if gpus >= 1 and (gpus != int(gpus) or int(gpus) % file.places):
        raise UsageError(f"{at}resources.GPU {gpus:g} cannot be dealt evenly to {file.places} engines")
    for index, engine in enumerate(file.engines):
        if gpus and (named := [name for name in DEVICES if name in engine.env]):
            raise UsageError(f"{at[:-4]}engines[{index}].env.{named[0]}: Ray gives the devices of a bundle")


def shown(resources: dict[str, float]) -> str:
    """Resources as people say them: `1 GPU and 4 CPU`."""
    order = sorted(resources, key=lambda name: (name != "GPU", name == "CPU", name))
    return " and ".join(f"{resources[name]:g} {name}" for name in order)


def node_of(bundle: int, ray_node: str) -> NodeName:
    """Our name of a Ray node as the place of one bundle. A bundle that comes to another node is another."""
    return NodeName(f"bundle-{bundle}-{ray_node[:NODE_ID]}")


def node_file(file: JobFile, bundle: int, *, ray_node: str, host: str, devices: tuple[str, ...]) -> NodeFile:
    """What the agent of `bundle` on this node owns; raises UsageError, also for what the node lacks."""
    folder = Path(file.state_dir).expanduser() / file.job / node_of(bundle, ray_node)
    common = NodeFile(job=file.job, node=node_of(bundle, ray_node), state_dir=str(folder), host=host)
    heads = tuple(entry for entry in file.entries if entry.part == 0)
    checked(msgspec.structs.replace(common, engines=heads), where=f"{host}: ")
    share = _shares(devices, file.places)
    own = tuple(map(_on, file.dealt(bundle), share))
    mine: set[EngineName] = {engine.name for engine in own}
    guests = tuple(each for each in file.entries if each.name not in mine)
    slots = file.places if bundle >= file.ray.bundles and guests else 0
    each = {name: amount / file.places for name, amount in file.ray.resources.items()}
    spare = Spare(slots=slots, devices=share if slots and devices else (), each=shown(each), engines=guests)
    return checked(msgspec.structs.replace(common, engines=own, spare=spare), where=f"{host}: ")


def _shares(devices: tuple[str, ...], places: int) -> tuple[str, ...]:
    """The devices of each place; all share one where there are fewer, a part of one being reserved."""
    each = len(devices) // places
    if each == 0:
        return (",".join(devices),) * places
    return tuple(",".join(devices[at * each : (at + 1) * each]) for at in range(places))


def _on(engine: Engine, devices: str) -> Engine:
    if not devices:
        return engine
    return msgspec.structs.replace(engine, env={**engine.env, DEVICES[0]: devices})
