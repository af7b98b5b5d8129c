"""The faults, in the order in which a job meets them, and what each must come to."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from relight.agents.adapters.ray import host, names
from relight.agents.adapters.ray.jobfile import JobFile
from relight.agents.node import proc
from relight.events.ids import EngineName
from relight.events.values import Phase, Process
from tests.ray_faults import rules
from tests.ray_faults.rules import FellShort, serving, until
from tests.ray_faults.world import (
    Engine,
    Job,
    World,
    actor_process,
    bundle_of,
    kill,
    raylet_of,
)

E0 = EngineName("e0")


class Stage:
    """A job that stands, and which incarnation of each engine is to serve in it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.incarnations = {engine.name: 1 for engine in job.file.engines}

    def settled(self, *lost: str) -> None:
        """Wait until all serve; those that were lost as their next incarnation."""
        for name in lost:
            self.incarnations[EngineName(name)] += 1
        serving(self.job, **self.incarnations)


Case = Callable[[Stage], None]


class Group(NamedTuple):
    """Cases that one job meets, one after the other."""

    bundles: int
    spares: int
    nodes: int
    cases: tuple[Case, ...]
    knobs: tuple[str, ...] = ()
    over_all: bool = False
    """Whether the job has one engine over all bundles, instead of one in each."""


@contextmanager
def untouched(stage: Stage, *engines: str) -> Iterator[None]:
    """These engines keep every process of theirs, and nobody lives twice."""
    before = stage.job.engines()
    yield
    broken = [*rules.unchanged(before, stage.job, *engines), *rules.lives(stage.job)]
    if broken:
        raise FellShort("; ".join(broken))


@contextmanager
def same_agents(stage: Stage) -> Iterator[None]:
    """Agents and actors outlive what is done."""
    agents, actors = stage.job.agents(), sorted(names.actors(stage.job.file))
    yield
    if stage.job.agents() != agents or sorted(names.actors(stage.job.file)) != actors:
        raise FellShort("an agent or an actor is another one than before")


def engine_core_killed(stage: Stage) -> None:
    with untouched(stage, "e1"), same_agents(stage):
        kill(stage.job.member("e0", "core"))
        stage.settled("e0")


def server_killed(stage: Stage) -> None:
    with untouched(stage, "e0"), same_agents(stage):
        kill(stage.job.member("e1", "leader"))
        stage.settled("e1")


def actor_killed(stage: Stage) -> None:
    """By the kernel: Ray hears of it afterwards."""
    _actor_ends(stage, "e0", lambda folder, _: _kill_actor(folder))


def actor_ended_by_ray(stage: Stage) -> None:
    import ray

    _actor_ends(stage, "e1", lambda _, holder: ray.kill(ray.get_actor(holder)))


def _actor_ends(stage: Stage, engine: str, end: Callable[[Path, str], None]) -> None:
    """`end` is given the agent's folder and the holder's name."""
    folder = stage.job.folder_of(engine)
    before = stage.job.holder(bundle_of(folder))
    agents = stage.job.agents()
    with untouched(stage, "e0", "e1"):
        end(folder, before)
        _succeeded(stage.job, bundle_of(folder), before)
        stage.settled()
    if stage.job.agents() != agents:
        raise FellShort("an agent is another one than before")


def agent_killed(stage: Stage) -> None:
    folder = stage.job.folder_of("e0")
    old = stage.job.agents()[folder.name]
    with untouched(stage, "e0", "e1"):
        kill(old)
        until(lambda: _another(stage.job, folder.name, old), "another agent on that node")
        stage.settled()


def overseer_killed(stage: Stage) -> None:
    """Ray makes it anew; it makes no second holder."""
    import ray

    actors = sorted(names.actors(stage.job.file))
    with untouched(stage, "e0", "e1"):
        ray.kill(ray.get_actor(names.overseer(stage.job.file)), no_restart=False)
        until(lambda: _answers(stage.job.file), "the overseer answers again")
        stage.settled()
    if sorted(names.actors(stage.job.file)) != actors:
        raise FellShort(f"there are {names.actors(stage.job.file)}, and there were {actors}")


def actor_agent_and_core_killed(stage: Stage) -> None:
    folder = stage.job.folder_of("e1")
    before = stage.job.holder(bundle_of(folder))
    with untouched(stage, "e0"):
        _kill_actor(folder)
        kill(stage.job.agents()[folder.name])
        kill(stage.job.member("e1", "core"))
        _succeeded(stage.job, bundle_of(folder), before)
        stage.settled("e1")


def a_second_agent_is_refused(stage: Stage) -> None:
    folder = stage.job.folder_of("e0")
    with untouched(stage, "e0", "e1"), same_agents(stage):
        words = [sys.executable, "-m", host.__name__, str(folder)]
        environment = {**os.environ, host.BUS: stage.job.world.bus.url}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != host.REFUSED:
            raise FellShort(f"a second agent of {folder.name} ended with {done.returncode}: {done.stderr}")
        stage.settled()


def up_again(stage: Stage) -> None:
    with untouched(stage, "e0", "e1"), same_agents(stage):
        done = stage.job.up()
        if done.returncode:
            raise FellShort(f"up again: {done.stderr}")
        stage.settled()


def raylet_killed_with_a_spare(stage: Stage) -> None:
    folder = stage.job.folder_of("e0")
    old = {engine: stage.job.engines()[engine] for engine in stage.job.engines() if engine.name == "e0"}
    with untouched(stage, "e1"):
        _lose(stage.job.world, stage.job, folder.name)
        stage.settled("e0")
    moved = rules.snapshot(stage.job).engines[EngineName("e0")]
    if moved.node == folder.name or _alive(old):
        raise FellShort(f"e0 is at {moved.node}, and of what was at {folder.name} there lives {_alive(old)}")


def raylet_killed_without_a_spare(stage: Stage) -> None:
    """It waits, and says for what; a new node brings it back."""
    folder = stage.job.folder_of("e0")
    with untouched(stage, "e1"):
        _lose(stage.job.world, stage.job, folder.name)
        until(lambda: "there is no node with 1 GPU and 1 CPU free" in _status(stage.job), "the reason")
        if any(engine.name == "e0" for engine in stage.job.engines()):
            raise FellShort("e0 lives though its reservation is gone")
        stage.job.world.add_node()
        stage.settled("e0")


def raylet_killed_behind_its_agent(stage: Stage) -> None:
    """Nobody is left there to end the engine; the next holder on the machine does, and says so."""
    folder = stage.job.folder_of("e1")
    old = {engine: stage.job.engines()[engine] for engine in stage.job.engines() if engine.name == "e1"}
    with untouched(stage, "e0"):
        _kill_actor(folder)
        kill(stage.job.agents()[folder.name])
        _lose(stage.job.world, stage.job, folder.name)
        if not _alive(old):
            raise FellShort("the engine was to live on, or the case shows nothing")
        stage.job.world.add_node()
        stage.settled("e1")
        until(lambda: not _alive(old), "what was left is ended")


def down_and_up_again(stage: Stage) -> None:
    """The same job, whichever bundle comes to which node: its engines go on as their next incarnations."""
    done = stage.job.down()
    remains = list(rules.left(stage.job))
    if done.returncode or remains:
        raise FellShort(f"down ended with {done.returncode}, and left {remains}: {done.stderr}")
    done = stage.job.up()
    if done.returncode:
        raise FellShort(f"up again: {done.stderr}")
    stage.settled("e0", "e1")


def down_in_a_recovery(stage: Stage) -> None:
    """The start of a replacement is under way when the job is ended."""
    kill(stage.job.member("e0", "core"))
    until(
        lambda: rules.snapshot(stage.job).engines[EngineName("e0")].phase is Phase.STARTING,
        "a replacement is being started",
    )


def further_part_killed(stage: Stage) -> None:
    """It ends the engine on both nodes, and both have proven it gone before the next incarnation begins."""
    old, nodes = stage.job.engines(), _places(stage.job)
    with same_agents(stage):
        kill(stage.job.leader(nodes[1], "e0"))
        stage.settled("e0")
    _whole_again(stage, old, nodes, stopped=set(nodes))


def raylet_of_a_further_part_killed(stage: Stage) -> None:
    """The spare bundle takes that part, and the head starts anew where it was. The part is told to be gone
    before anybody knows that its node is: an incarnation may be spent on that."""
    old, (head, further) = stage.job.engines(), _places(stage.job)
    _lose(stage.job.world, stage.job, further)

    def taken() -> bool:
        state = rules.snapshot(stage.job).engines[E0]
        there = [bundle_of(stage.job.folder / part.node) for part in state.parts]
        serves = state.phase is Phase.SERVING and state.incarnation > stage.incarnations[E0]
        return serves and there == [stage.job.file.all_bundles - 1]

    until(taken, "the engine serves again, with its further part in the spare bundle")
    stage.incarnations[E0] = rules.snapshot(stage.job).engines[E0].incarnation
    spare = _places(stage.job)[1]
    _whole_again(stage, old, [head, spare], stopped={head})


def _places(job: Job) -> list[str]:
    """The nodes of an engine over several, its head's first."""
    state = rules.snapshot(job).engines[E0]
    return [state.node, *(part.node for part in state.parts)]


def _whole_again(
    stage: Stage, old: dict[Engine, frozenset[Process]], nodes: list[str], *, stopped: set[str]
) -> None:
    """One incarnation lives, a part on each of these nodes, and nothing of the old one, which was proven gone
    from the `stopped` ones before."""
    incarnation = stage.incarnations[E0]
    if (there := _places(stage.job)) != nodes:
        raise FellShort(f"e0 is at {there}, and was to be at {nodes}")
    wanted = {Engine(node, E0, incarnation) for node in nodes}
    if stage.job.engines().keys() != wanted or _alive(old):
        raise FellShort(f"there lives {stage.job.engines()}, and of the old one {_alive(old)}")
    if broken := list(rules.one_after_another(stage.job, "e0", incarnation, stopped)):
        raise FellShort("; ".join(broken))


def gcs_killed(stage: Stage) -> None:
    """Its state is in a Redis of its own; meanwhile an engine dies."""
    head = stage.job.world.cluster.head_node
    with untouched(stage, "e1"), same_agents_by_pid(stage):
        head.kill_gcs_server()
        kill(stage.job.member("e0", "core"))
        stage.settled("e0")
        head.start_gcs_server()
        until(lambda: _answers(stage.job.file), "the overseer answers again")


@contextmanager
def same_agents_by_pid(stage: Stage) -> Iterator[None]:
    agents = stage.job.agents()
    yield
    if stage.job.agents() != agents:
        raise FellShort("an agent is another one than before")


def _kill_actor(folder: Path) -> None:
    """SIGKILL, once its process is known by its name: a successor counts as an actor before it bears one."""

    def killed() -> bool:
        pid = actor_process(folder)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    until(killed, f"the actor of {folder.name} has a process")


def _lose(world: World, job: Job, node: str) -> None:
    folder = job.folder / node
    world.cluster.remove_node(raylet_of(world, folder), allow_graceful=False)


def _alive(old: dict[Engine, frozenset[Process]]) -> list[Process]:
    processes = [process for group in old.values() for process in group]
    return [process for process in processes if proc.liveness(process) is proc.Liveness.ALIVE]


def _status(job: Job) -> str:
    done = job.world.relight("status", "--job", job.name, "--format", "json")
    engines = json.loads(done.stdout)["engines"]
    return " ".join(str(engine["why"]) for engine in engines)


def _succeeded(job: Job, bundle: int, before: str) -> None:
    def holds() -> bool:
        numbers = names.numbers(job.file, bundle)
        return len(numbers) == 1 and names.holder(job.file, bundle, numbers[0]) != before

    until(holds, f"one successor of {before}")


def _another(job: Job, node: str, old: Process) -> bool:
    return job.agents().get(node, old) != old


def _answers(file: JobFile) -> bool:
    import ray
    from ray.exceptions import RayError

    try:
        overseer = ray.get_actor(names.overseer(file))
        return len(ray.get(overseer.view.remote(), timeout=5)) == file.all_bundles
    except (ValueError, RayError):
        return False


ONE_BY_ONE = (
    engine_core_killed,
    server_killed,
    actor_killed,
    actor_ended_by_ray,
    agent_killed,
    actor_agent_and_core_killed,
    overseer_killed,
    a_second_agent_is_refused,
    up_again,
    raylet_killed_with_a_spare,
)
WITHOUT_A_SPARE = (down_and_up_again, raylet_killed_without_a_spare, raylet_killed_behind_its_agent)
OVER_TWO_NODES = (further_part_killed, raylet_of_a_further_part_killed)
GROUPS = (
    Group(bundles=2, spares=1, nodes=3, cases=ONE_BY_ONE),
    Group(bundles=2, spares=0, nodes=2, cases=WITHOUT_A_SPARE),
    Group(bundles=2, spares=1, nodes=3, cases=OVER_TWO_NODES, over_all=True),
    Group(bundles=1, spares=0, nodes=1, cases=(down_in_a_recovery,), knobs=("--slow-start-s", "5")),
)
WITH_A_GCS_THAT_MAY_DIE = Group(bundles=2, spares=0, nodes=2, cases=(gcs_killed,))
SHORT = (engine_core_killed, actor_killed, agent_killed, raylet_killed_with_a_spare)
