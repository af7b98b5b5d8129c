"""What is known of a case from outside: streams, state, notes of lives, sights, traces, answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from relight.events import codec
from relight.events.decisions import AnyDecision
from relight.events.envelope import Entry
from relight.events.ids import EngineName
from relight.events.schema import Snapshot
from tests.crash_points.layout import BYSTANDER
from tests.crash_points.points import Case, Pass
from tests.crash_points.watcher import Sight
from tests.crash_points.world import Spoken, Started, World, left_of


class Mark(NamedTuple):
    """How things stood when the case began."""

    snapshot: Snapshot
    lives: int
    sights: int
    passes: int
    bystander_log: int
    services: dict[str, int]


class Seen(NamedTuple):
    """Everything that is judged."""

    case: Case
    before: Mark
    after: Snapshot
    entries: list[Entry]
    """Of `decisions`, since the case began."""
    passes: list[Pass]
    sights: list[Sight]
    lives: list[Started]
    """All, since the world began."""
    answers: dict[EngineName, Spoken]
    reference: Spoken
    remains: list[str]
    bystander_log: str
    parked: int
    unasked: list[str]
    """Services that ended otherwise than by a death that was planned."""

    @property
    def decisions(self) -> list[AnyDecision]:
        return [codec.decode_decision(each) for each in self.entries if not codec.is_fact(each)]

    @property
    def deaths(self) -> list[Pass]:
        return [each for each in self.passes if each.dies]


def mark(world: World, snapshot: Snapshot) -> Mark:
    return Mark(
        snapshot,
        len(world.started()),
        len(_lines(world.root / "sights")),
        len(_lines(world.files.trace)),
        _bystander_log(world).stat().st_size,
        {name: len(service.lives) for name, service in world.services.items()},
    )


async def look(world: World, case: Case, before: Mark, after: Snapshot) -> Seen:
    """Collect what is judged. `after`: the state at rest; what a late word brings behind it is not judged."""
    entries: list[Entry] = []
    last = before.snapshot.tail
    while more := await world.job.read_decisions(last):
        entries += more
        last = more[-1].entry_id
    tails = [each.entry_id for each in entries]
    if after.tail in tails:
        entries = entries[: tails.index(after.tail) + 1]
    routes = {name: engine.route for name, engine in after.engines.items()}
    answers = {name: await world.ask(route.address) for name, route in routes.items() if route is not None}
    lives = world.started()
    present = {(name, engine.incarnation) for name, engine in after.engines.items()}
    past = [life for life in lives if (life.engine, life.incarnation) not in present]
    trace = [msgspec.json.decode(line, type=Pass) for line in _lines(world.files.trace)[before.passes :]]
    with _bystander_log(world).open("rb") as log:
        log.seek(before.bystander_log)
        noted = log.read().decode(errors="replace")
    return Seen(
        case=case,
        before=before,
        after=after,
        entries=entries,
        passes=trace,
        sights=[msgspec.json.decode(line, type=Sight) for line in _lines(world.root / "sights")],
        lives=lives,
        answers=answers,
        reference=world.reference,
        remains=[text for life in past for text in left_of(world, life)],
        bystander_log=noted,
        parked=await world.job.parked(),
        unasked=_unasked(world, before, trace),
    )


def _unasked(world: World, before: Mark, trace: Sequence[Pass]) -> list[str]:
    planned = {each.pid for each in trace if each.dies}
    return [
        f"{name} (pid {life.pid}) ended with code {life.code}"
        for name, service in world.services.items()
        for life in service.lives[before.services[name] :]
        if (life.pid, life.code) not in {(pid, -9) for pid in planned}
    ]


def _bystander_log(world: World) -> Path:
    return world.root / "state/engines" / BYSTANDER / "1/log"


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []
