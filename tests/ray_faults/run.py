"""One job's life with its faults, and a job that the cluster has no room for: what came of each."""

import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from relight.agents.adapters.ray import names
from relight.agents.node import proc
from tests.ray_faults import rules
from tests.ray_faults.cases import Case, Group, Stage
from tests.ray_faults.rules import FellShort
from tests.ray_faults.world import Job, World

NO_ROOM_S = 5.0


class Outcome(NamedTuple):
    """What came of one fault."""

    name: str
    seconds: float
    short: str | None
    """In what it fell short."""


def run(world: World, group: Group) -> Iterator[Outcome]:
    """One job's life: up, its faults, down, and nothing left."""
    world.nodes_wanted(group.nodes)
    job = world.job(bundles=group.bundles, spares=group.spares, knobs=group.knobs, over_all=group.over_all)
    began = time.monotonic()
    short = _short(lambda: _up(job))
    over = ", one engine over both" if group.over_all else ""
    yield Outcome(f"up: {group.bundles} bundles, {group.spares} spare{over}", time.monotonic() - began, short)
    stage = Stage(job)
    for case in group.cases if short is None else ():
        began = time.monotonic()
        short = _short(partial(_met, stage, case))
        yield Outcome(_said(case.__name__), time.monotonic() - began, short)
        if short is not None:
            break
    began = time.monotonic()
    yield Outcome("down: nothing left", _down(job, short := []), "; ".join(short) or None)


def _up(job: Job) -> None:
    done = job.up()
    if done.returncode:
        raise FellShort(f"`relight ray up` ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    rules.serving(job, **{engine.name: 1 for engine in job.file.engines})
    for engine in job.file.engines:
        told = proc.environment(job.member(engine.name, "leader").pid)
        if b"CUDA_VISIBLE_DEVICES=0" not in told:
            raise FellShort(f"{engine.name} was not given its bundle's device")


def _met(stage: Stage, case: Case) -> None:
    """Whatever was replaced in it, the job's one reservation is there, and no other."""
    case(stage)
    if (there := rules.reservations()) != [names.group(stage.job.file)]:
        raise FellShort(f"the placement groups {there} are reserved")


def _down(job: Job, short: list[str]) -> float:
    began = time.monotonic()
    done = job.down()
    if done.returncode:
        short.append(f"`relight ray down` ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    short += rules.left(job)
    return time.monotonic() - began


def _short(what: Callable[[], None]) -> str | None:
    try:
        what()
    except FellShort as error:
        return str(error)
    except Exception:  # noqa: BLE001 -- a case that breaks is told as one, and its job is ended
        return traceback.format_exc()
    return None


def _said(name: str) -> str:
    return name.replace("_", " ")


def without_room(world: World) -> Outcome:
    """One bundle more than there are nodes: it says what is lacking, and nothing of it stays."""
    world.nodes_wanted(1)
    job = world.job(bundles=1, spares=1)
    began = time.monotonic()
    done = job.up(within_s=NO_ROOM_S)
    short: list[str] = []
    if done.returncode != 1:
        short.append(f"`relight ray up` ended with {done.returncode}")
    if "1 of 2 bundles fit, and for the others there is no node with 1 GPU and 1 CPU free" not in done.stderr:
        short.append(f"it said {done.stderr!r}")
    short += rules.left(job)
    return Outcome("up without room", time.monotonic() - began, "; ".join(short) or None)


def with_a_program_that_no_node_has(world: World) -> Outcome:
    """The file is wrong as far as a node can tell: that is said with the place, and nothing of it stays."""
    world.nodes_wanted(1)
    job = world.job(bundles=1, spares=0, program="no-such-program")
    began = time.monotonic()
    done = job.up()
    short: list[str] = []
    if done.returncode != 2 or "$.engines[0].command[0] 'no-such-program'" not in done.stderr:
        short.append(f"`relight ray up` ended with {done.returncode} and said {done.stderr!r}")
    short += rules.left(job)
    return Outcome("up with a program that is not there", time.monotonic() - began, "; ".join(short) or None)
