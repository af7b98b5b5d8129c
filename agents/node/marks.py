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


SETTLED_S = 60.0
"""A process this old has long run the program that it was forked for."""
_strangers: set[Process] = set()
"""Settled processes that wear no mark of any agent: they cannot come to wear one, so each is read once."""


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
    for stat in _candidates(proc.all_stats()):
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
    mine = {process.pid for process in known if _is(stats, process)}
    since = marks.leader.start if marks.leader else 0
    titles: dict[int, str] = {}
    for stat in _candidates(stats):
        if stat.pid in mine or stat.start < since:
            continue
        titles[stat.pid] = proc.command_line(stat.pid)
        if _entitled(titles[stat.pid], marks) or _wears(stat.pid, marks):
            mine.add(stat.pid)
    _add_session(mine, stats, marks)
    _add_descendants(mine, stats)
    return [
        Found(stats[pid].process, _role(pid, marks, titles), stats[pid].dead)
        for pid in sorted(mine - proc.ancestors(os.getpid()))
    ]


def _candidates(stats: dict[int, Stat]) -> Iterable[Stat]:
    """Live processes that may wear a mark: neither we, nor ours above, nor known strangers."""
    _strangers.intersection_update([stat.process for stat in stats.values()])
    ours = proc.ancestors(os.getpid())
    settled = proc.ticks_now() - SETTLED_S * proc.TICKS_A_SECOND
    for stat in stats.values():
        if stat.dead or stat.pid in ours or stat.process in _strangers:
            continue
        if stat.start < settled and not _wears_any(stat.pid):
            _strangers.add(stat.process)
            continue
        yield stat


def _wears_any(pid: int) -> bool:
    """Whether the process shows a mark of any agent's engine."""
    return "relight." in proc.command_line(pid) or any(
        word.startswith(f"{TAG}=".encode()) or b"/relight-" in word for word in proc.environment(pid)
    )


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
