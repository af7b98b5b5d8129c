"""Which processes belong to one incarnation of one engine, and nothing else does.

Marks: the session that it was started in, descent from one of its processes, the tag in the environment or
in front of the process title, its TMPDIR. Parentage upwards is none: orphans become the agent's children,
beside its log pumps and its other engines. The tag is known before the command is run.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from relight.agents.node import proc
from relight.agents.node.proc import Stat
from relight.events.ids import EngineName, JobName
from relight.events.values import Process

TAG = "RELIGHT_TAG"
Role = Literal["leader", "core", "worker", "other"]
VITAL: tuple[Role, ...] = ("leader", "core", "worker")
"""The end of one of these is the engine's death."""


class Marks(NamedTuple):
    """By what the processes of one incarnation are known."""

    tag: str
    tmpdir: str
    leader: Process | None
    """The process that was started, whose pid is its session's number."""


class Found(NamedTuple):
    process: Process
    role: Role
    dead: bool


def slot_id(job: JobName, *, state_dir: Path) -> str:
    """What tells this agent's engines from those of every other state directory on the host."""
    return hashlib.sha256(f"{job}\0{state_dir.resolve()}".encode()).hexdigest()[:10]


def tag_of(slot: str, engine: EngineName, incarnation: int) -> str:
    """The incarnation's tag: made again, byte for byte, by an agent that lost its disk."""
    return f"relight.{slot}.{engine}.{incarnation}"


def family(slot: str, engine: EngineName) -> dict[int, list[Process]]:
    """Live processes that bear a tag of any incarnation of the engine, by incarnation."""
    pattern = re.compile(re.escape(f"relight.{slot}.{engine}.") + r"(\d+)(?:::|$)")
    found: dict[int, list[Process]] = {}
    ours = proc.ancestors(os.getpid())
    for stat in proc.all_stats().values():
        if stat.dead or stat.pid in ours:
            continue
        texts = [proc.command_line(stat.pid), *(word.decode(errors="replace") for word in _tags(stat.pid))]
        for text in texts:
            if match := pattern.search(text):
                found.setdefault(int(match[1]), []).append(stat.process)
                break
    return found


def _tags(pid: int) -> Iterable[bytes]:
    prefix = f"{TAG}=".encode()
    return (word for word in proc.environment(pid) if word.startswith(prefix))


def search(marks: Marks, known: Iterable[Process]) -> list[Found]:
    """Every process of the incarnation that is in the process table now, the dead ones marked so."""
    stats = proc.all_stats()
    ours = proc.ancestors(os.getpid())
    mine = {process.pid for process in known if _is(stats, process)}
    since = marks.leader.start if marks.leader else 0
    titles: dict[int, str] = {}
    for stat in stats.values():
        if stat.pid in mine or stat.pid in ours or stat.start < since or stat.dead:
            continue
        titles[stat.pid] = proc.command_line(stat.pid)
        if _entitled(titles[stat.pid], marks) or _wears(stat.pid, marks):
            mine.add(stat.pid)
    _add_session(mine, stats, marks)
    _add_descendants(mine, stats)
    return [
        Found(stats[pid].process, _role(pid, marks, titles), stats[pid].dead) for pid in sorted(mine - ours)
    ]


def bears(process: Process, marks: Marks) -> bool:
    """Whether this very process shows the tag or the TMPDIR."""
    return _entitled(proc.command_line(process.pid), marks) or _wears(process.pid, marks)


def _entitled(title: str, marks: Marks) -> bool:
    """Titles are `PREFIX::EngineCore`; a command line that only speaks of the tag is another's."""
    return f"{marks.tag}::" in title


def _is(stats: dict[int, Stat], process: Process) -> bool:
    stat = stats.get(process.pid)
    return stat is not None and stat.start == process.start


def _wears(pid: int, marks: Marks) -> bool:
    return not proc.environment(pid).isdisjoint(
        (f"{TAG}={marks.tag}".encode(), f"TMPDIR={marks.tmpdir}".encode())
    )


def _add_session(mine: set[int], stats: dict[int, Stat], marks: Marks) -> None:
    """A session's number is not issued again while a member lives; one known member proves it is ours."""
    if marks.leader is None:
        return
    number = marks.leader.pid
    members = {stat.pid for stat in stats.values() if stat.session == number}
    if not _is(stats, marks.leader) and (number in stats or not members & mine):
        return
    mine |= members


def _add_descendants(mine: set[int], stats: dict[int, Stat]) -> None:
    while fresh := {stat.pid for stat in stats.values() if stat.ppid in mine} - mine:
        mine |= fresh


def _role(pid: int, marks: Marks, titles: dict[int, str]) -> Role:
    if marks.leader is not None and pid == marks.leader.pid:
        return "leader"
    title = titles.get(pid)
    if title is None:
        title = proc.command_line(pid)
    if "::EngineCore" in title:
        return "core"
    return "worker" if "::Worker" in title else "other"
