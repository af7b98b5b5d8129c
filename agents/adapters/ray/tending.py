"""The agent of one folder, from outside: started so that it outlives whoever starts it, found again, ended.

Ray's worker kills its children at its end, and may kill its process group: an agent is a child of neither,
and has a session of its own. Where the raylet itself adopts and kills orphans nothing can be kept, and that
is refused.
"""

import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

from relight.agents.adapters.ray import host
from relight.agents.node import marks, pidfd, proc
from relight.agents.node.config import NodeFile
from relight.agents.node.proc import Liveness
from relight.agents.node.record import write
from relight.events import codec
from relight.events.errors import RelightError, UsageError
from relight.events.values import Process

START_S = 60.0
"""For a process to say that it is the agent: it imports for a second or two."""
POLL_S = 0.02
LOG_BYTES = 16_000_000
"""A log larger than this is put aside when an agent is started."""
_PR_GET_CHILD_SUBREAPER = 37
_BETWEEN = """
import os, sys
os.set_inheritable(3, False)
os.chdir(sys.argv[-1])
os.write(3, b"%d" % os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, setsid=True))
"""
"""Starts what its arguments say in a session of its own, tells the pid through descriptor 3, and is gone."""
_OF_RAY = ("OMP_NUM_THREADS",)
"""What Ray sets for its workers by the CPUs that they reserve; an engine is told by its own `env`."""


class NotEnded(RelightError):
    """An agent, or an engine of it, lives on. The message names which."""


def refuse_subreaper() -> None:
    """Raise UsageError where whatever outlives an actor is killed by its raylet."""
    found = ctypes.c_int()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    if found.value:
        flag = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
        raise UsageError(f"this Ray kills what outlives an actor ({flag} is set): start it without that")


def identity(pid: int) -> Process:
    """The process that has this pid now; one that is gone has start 0."""
    stat = proc.read_stat(pid)
    return stat.process if stat else Process(pid, 0)


def alive(folder: Path) -> Process | None:
    """The agent of `folder`, where it lives."""
    known = host.read(folder)
    if known is None or proc.liveness(known.process) is not Liveness.ALIVE:
        return None
    return known.process


def ensure(file: NodeFile, raylet: Process | None, *, bus_url: str) -> Process:
    """The agent of `file`, started where none lives. Raises NotEnded where none comes up."""
    folder = file.state_path
    folder.mkdir(parents=True, exist_ok=True)
    if (found := alive(folder)) is not None:
        return found
    write(folder / host.FILE, codec.to_json(file).encode())
    return start(folder, raylet, bus_url=bus_url)


def start(folder: Path, raylet: Process | None, *, bus_url: str) -> Process:
    """Start the agent of `folder` and return it once it says that it is; raises NotEnded."""
    before = host.read(folder)
    log = folder / host.LOG
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".old"))
    child = _spawn(folder, _environment(raylet, bus_url), log)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        known = host.read(folder)
        if known is not None and known != before and proc.liveness(known.process) is Liveness.ALIVE:
            return known.process
        if proc.liveness(child) is Liveness.DEAD:
            break
        time.sleep(POLL_S)
    if (found := alive(folder)) is not None:  # it came first, and ours was refused
        return found
    raise NotEnded(f"the agent of {folder} does not come up; its log is {log}: {last_line(log)}")


def _spawn(folder: Path, environment: dict[str, str], log: Path) -> Process:
    """A process in a session of its own whose parent is gone when this returns."""
    reading, writing = os.pipe()
    words = [sys.executable, "-m", host.__name__, str(folder)]
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        between = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", _BETWEEN, *words],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out, 1),
                (os.POSIX_SPAWN_DUP2, out, 2),
                (os.POSIX_SPAWN_DUP2, writing, 3),
            ],
            setsigmask=(),
        )
        os.close(writing)
        told = os.read(reading, 32)
        os.waitpid(between, 0)
    finally:
        os.close(out)
        os.close(reading)
    if not told:
        raise NotEnded(f"{sys.executable} cannot be run for the agent of {folder}")
    return identity(int(told))


def _environment(raylet: Process | None, bus_url: str) -> dict[str, str]:
    """Ours, less what Ray put into it, with what the agent is told."""
    environment = {**os.environ, host.BUS: bus_url}
    environment.pop(host.RAYLET, None)
    if raylet is not None:
        theirs = proc.environment(raylet.pid)
        for name in _OF_RAY:
            if not any(word.startswith(f"{name}=".encode()) for word in theirs):
                environment.pop(name, None)
        environment[host.RAYLET] = f"{raylet.pid} {raylet.start}"
    return environment


def wait_end(process: Process, *, within_s: float) -> bool:
    """Whether it has ended."""
    fd = pidfd.hold(process)
    if fd is None:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))
    finally:
        os.close(fd)


def end(folder: Path, *, bus_url: str, within_s: float) -> None:
    """End the agent of `folder` and its engines, proven by itself or, where it is dead, by a successor.

    Raises NotEnded.
    """
    file = codec.from_json((folder / host.FILE).read_bytes(), NodeFile)
    deadline = time.monotonic() + within_s
    if not running(folder) and left(file):
        start(folder, None, bus_url=bus_url)
    while agents := running(folder):
        for agent in agents:
            _ask_to_end(agent)
        for agent in agents:
            if not wait_end(agent, within_s=max(0.0, deadline - time.monotonic())):
                text = f"the agent of {file.node} (pid {agent.pid}) has not ended within {within_s:g} s"
                raise NotEnded(text)
    if living := left(file):
        raise NotEnded(f"of {file.node} there still live {', '.join(living)}")


def _ask_to_end(agent: Process) -> None:
    if (fd := pidfd.hold(agent)) is not None:
        pidfd.send(fd, signal.SIGTERM)
        os.close(fd)


def running(folder: Path) -> list[Process]:
    """Processes that are the agent of `folder`, or about to be."""
    words = f"-m {host.__name__} {folder}"
    stats = proc.all_stats().values()
    return [stat.process for stat in stats if not stat.dead and proc.command_line(stat.pid).endswith(words)]


def left(file: NodeFile) -> list[str]:
    """Engines of which processes live on this machine that belong to the agent of `file`."""
    return sorted(marks.engines_of(marks.slot_id(file.job, state_dir=file.state_path)))


def last_line(log: Path) -> str:
    """The last line of a log, for people."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return str(error.strerror)
    return lines[-1] if lines else "it is empty"
