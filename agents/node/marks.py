"""Which processes belong to one incarnation of one engine, and nothing else does.

Marks: the session that it was started in, descent from one of its processes, the tag in the environment or
in front of the process title, its TMPDIR. Parentage upwards is none: orphans become the agent's children,
beside its log pumps and its other engines. The tag is known before the command is run.
"""

import hashlib
import os
import re
import tempfile
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


SOCKET_PATH = 60
"""Longest TMPDIR: vLLM puts sockets of 36 characters there, and their paths end at 108 bytes."""
SETTLED_S = 60.0
"""A process this old has long run the program that it was forked for."""


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


class Worn(NamedTuple):
    """What one process shows of any agent's marks; empty for a stranger."""

    title: str
    words: frozenset[bytes]
    """The strings of its environment that may be a mark."""


_settled: dict[Process, Worn] = {}
"""Of settled processes: they cannot come to wear another mark, so each is read once. A node has thousands."""
_TAGGED = f"{TAG}=".encode()


def slot_id(job: JobName, *, state_dir: Path) -> str:
    """What tells this agent's engines from those of every other state directory on the host."""
    return hashlib.sha256(f"{job}\0{state_dir.resolve()}".encode()).hexdigest()[:10]


def tag_of(slot: str, engine: EngineName, incarnation: int) -> str:
    """The incarnation's tag: made again, byte for byte, by an agent that lost its disk."""
    return f"relight.{slot}.{engine}.{incarnation}"


def folder_of(tag: str) -> Path:
    """The TMPDIR of the incarnation with this tag: short, since sockets lie in it."""
    base = tempfile.gettempdir()
    if len(base) > SOCKET_PATH - 25:
        base = "/tmp"  # noqa: S108
    return Path(base) / f"relight-{hashlib.sha256(tag.encode()).hexdigest()[:14]}"


def engines_of(slot: str) -> set[str]:
    """Names of the engines of which live processes bear a tag of this slot's agent."""
    tag = re.compile(re.escape(f"relight.{slot}.") + r"([a-z0-9-]+)\.\d+")
    stats = proc.all_stats()
    return {
        told[1]
        for _, worn in _marked(stats, stats.values())
        for text in (*(word.decode(errors="replace") for word in worn.words), worn.title)
        if (told := tag.match(text.removeprefix(f"{TAG}=")))
    }


def family(slot: str, engine: EngineName) -> dict[int, list[Process]]:
    """Live processes that bear a tag of any incarnation of the engine, by incarnation."""
    tag = re.escape(f"relight.{slot}.{engine}.") + r"(\d+)"
    found: dict[int, list[Process]] = {}
    stats = proc.all_stats()
    for stat, worn in _marked(stats, stats.values()):
        words = (word.decode(errors="replace") for word in worn.words)
        told = re.search(f"{tag}::", worn.title)
        tagged = next(filter(None, (re.fullmatch(f"{TAG}={tag}", word) for word in words)), None)
        if tagged is None and told is not None:
            whole = told[0].removesuffix("::")
            if _entitled(worn.title, whole) or _wears(worn.words, Marks(whole, str(folder_of(whole)), None)):
                tagged = told
        if tagged is not None:
            found.setdefault(int(tagged[1]), []).append(stat.process)
    return found


def search(marks: Marks, known: Iterable[Process]) -> list[Found]:
    """Every process of the incarnation that is in the process table now, the dead ones marked so."""
    stats = proc.all_stats()
    mine = {process.pid for process in known if _is(stats, process)}
    since = marks.leader.start if marks.leader else 0
    titles: dict[int, str] = {}
    fresh = [stat for stat in stats.values() if stat.start >= since and stat.pid not in mine]
    for stat, worn in _marked(stats, fresh):
        titles[stat.pid] = worn.title
        if _entitled(worn.title, marks.tag) or _wears(worn.words, marks):
            mine.add(stat.pid)
    _add_session(mine, stats, marks)
    _add_descendants(mine, stats)
    return [
        Found(stats[pid].process, _role(stats[pid], marks, titles), stats[pid].dead)
        for pid in sorted(mine - proc.ancestors(os.getpid()))
    ]


def _marked(stats: dict[int, Stat], among: Iterable[Stat]) -> Iterable[tuple[Stat, Worn]]:
    """Live processes that may wear a mark, with those they wear; neither we nor ours above."""
    for gone in _settled.keys() - {stat.process for stat in stats.values()}:
        del _settled[gone]
    ours = proc.ancestors(os.getpid())
    settled = proc.ticks_now() - SETTLED_S * proc.TICKS_A_SECOND
    for stat in among:
        if stat.dead or stat.pid in ours:
            continue
        worn = _settled.get(stat.process) or worn_by(stat.pid)
        if stat.start < settled:
            _settled[stat.process] = worn
        yield stat, worn


def worn_by(pid: int) -> Worn:
    """The marks that the process shows now."""
    title = proc.command_line(pid)
    words = (word for word in proc.environment(pid) if word.startswith((_TAGGED, b"TMPDIR=")))
    return Worn(title if "relight." in title else "", frozenset(words))


def bears(process: Process, marks: Marks) -> bool:
    """Whether this very process shows the tag or the TMPDIR."""
    worn = worn_by(process.pid)
    return _entitled(worn.title, marks.tag) or _wears(worn.words, marks)


def _entitled(title: str, tag: str) -> bool:
    """Titles begin `PREFIX::`; a command line that only speaks of one (a search for it) is another's."""
    return bool(tag) and title.startswith(f"{tag}::")


def _is(stats: dict[int, Stat], process: Process) -> bool:
    stat = stats.get(process.pid)
    return stat is not None and stat.start == process.start


def _wears(words: frozenset[bytes], marks: Marks) -> bool:
    """An empty value is nobody's mark: what was never started has none, others' may be empty."""
    named = ((TAG, marks.tag), ("TMPDIR", marks.tmpdir))
    return not words.isdisjoint(f"{name}={value}".encode() for name, value in named if value)


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


def _role(stat: Stat, marks: Marks, titles: dict[int, str]) -> Role:
    """A process that has just been forked shows its parent's title until its exec(2), and may end well."""
    if marks.leader is not None and stat.pid == marks.leader.pid:
        return "leader"
    role = role_of(titles.get(stat.pid) or proc.command_line(stat.pid))
    return "other" if role == role_of(proc.command_line(stat.ppid)) else role


def role_of(title: str) -> Role:
    """What vLLM calls a process with this title."""
    if "::EngineCore" in title:
        return "core"
    return "worker" if "::Worker" in title else "other"
