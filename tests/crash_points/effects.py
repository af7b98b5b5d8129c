"""What the two processes do to the world, and how a point is put before and after each of it.

Functions of relight that are an effect by themselves (a commit, an append, a call) are wrapped where they
are defined; what goes to disk or to other processes is wrapped in `os`, `shutil` and `signal`, so that no
write can be forgotten. Questions that a watch repeats by the clock (looks at an engine) are no effects.
"""

import inspect
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from relight.agents.adapters import vllm
from relight.agents.node import record, stall
from relight.agents.outbox import FileOutbox
from relight.events.bus.client import Bus
from relight.events.bus.job import JobBus
from relight.events.bus.roll import Roll
from relight.events.decisions import Decision
from tests.crash_points.points import Committed, When


class Passes(Protocol):
    def __call__(
        self, when: When, what: str, *, failed: bool = False, commit: Committed | None = None
    ) -> None: ...


Label = Callable[..., str | None]
"""The effect's name from the arguments of its call; None: this call is no effect that counts."""

OF_THE_BUS: dict[type, tuple[str, ...]] = {
    JobBus: ("park",),
    Roll: ("take", "look", "release", "forget", "beat", "leave"),
    Bus: ("enrol",),
}
"""What an orchestrator does there besides its commits: leases, trimming, its own presence."""

DISK = ("write", "fsync", "replace")
"""Of `os`: the steps of a durable write."""


def of_orchestrator(passes: Passes) -> None:
    """Put points around the effects of `relight orchestrate`."""
    _around_commits(passes)
    for owner, names in OF_THE_BUS.items():
        for name in names:
            _around(owner, name, passes, _named(name))


def of_agent(passes: Passes) -> None:
    """Put points around the effects of `relight agent`."""
    _around(JobBus, "append", passes, _append)
    _around(FileOutbox, "put", passes, lambda _, fact: f"put {type(fact).__name__}")
    _around(FileOutbox, "sent", passes, lambda *_: "sent")
    _around_files(passes)
    _around(os, "mkdir", passes, lambda path, *_, **__: "mkdir TMPDIR" if _is_tmpdir(path) else None)
    _around(
        os, "unlink", passes, lambda path, *_, **__: "unlink segment" if "/dev/shm" in str(path) else None
    )
    _around(shutil, "rmtree", passes, lambda path, *_, **__: "rmtree TMPDIR" if _is_tmpdir(path) else None)
    _around(os, "posix_spawn", passes, lambda _, argv, *__, **___: f"spawn {_program(argv)}")
    _around(signal, "pidfd_send_signal", passes, lambda _, number: f"signal {signal.Signals(number).name}")
    _around(vllm.Client, "_send", passes, _call)


def _around(owner: Any, name: str, passes: Passes, label: Label) -> None:
    """Make each call of `owner.name` pass two points."""
    inner = getattr(owner, name)

    @wraps(inner)
    def plain(*args: Any, **kwargs: Any) -> Any:
        what = label(*args, **kwargs)
        if what is None:
            return inner(*args, **kwargs)
        passes("before", what)
        try:
            result = inner(*args, **kwargs)
        except Exception:
            passes("after", what, failed=True)
            raise
        passes("after", what)
        return result

    @wraps(inner)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        what = label(*args, **kwargs)
        if what is None:
            return await inner(*args, **kwargs)
        passes("before", what)
        try:
            result = await inner(*args, **kwargs)
        except Exception:
            passes("after", what, failed=True)
            raise
        passes("after", what)
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(inner) else plain)


def _named(name: str) -> Label:
    return lambda *_, **__: name


def _around_commits(passes: Passes) -> None:
    inner = JobBus.commit

    async def commit(self: JobBus, commit: Any, *, lease: Any, source: Any) -> None:
        names = [type(decision).__name__ for decision in commit.decisions]
        ids = tuple(each.id for each in commit.decisions if isinstance(each, Decision))
        what, told = f"commit {'+'.join(names) or 'state'}", Committed(lease.epoch, commit.number, ids)
        passes("before", what, commit=told)
        try:
            await inner(self, commit, lease=lease, source=source)
        except Exception:
            passes("after", what, failed=True, commit=told)
            raise
        passes("after", what, commit=told)

    setattr(JobBus, "commit", commit)  # noqa: B010


def _append(_: JobBus, facts: Any, **__: Any) -> str:
    return f"append {'+'.join(type(each.fact).__name__ for each in facts) or 'boot'}"


def _call(_: vllm.Client, method: str, path: str, **__: Any) -> str | None:
    return None if _asked_by_the_watch() else f"call {method} {path.partition('?')[0]}"


def _asked_by_the_watch() -> bool:
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_filename == stall.__file__:
            return True
    return False


def _around_files(passes: Passes) -> None:
    """Points around each step of a durable write, named by the file and, of a record, by its phase."""
    writing: list[str] = []
    write = record.write

    def named(path: Path, data: bytes) -> None:
        phase = re.search(rb'"phase":"(\w+)"', data)
        engine = f"{path.parent.name} " if path.name == "record.json" else ""
        writing.append(f"{engine}{path.name}{f' {phase[1].decode()}' if phase else ''}")
        try:
            write(path, data)
        finally:
            writing.pop()

    setattr(record, "write", named)  # noqa: B010

    def step(name: str) -> Label:
        def label(first: Any, *_: Any, **__: Any) -> str | None:
            if writing:
                folder = name == "fsync" and Path(f"/proc/self/fd/{first}").readlink().is_dir()
                return f"{name}{' folder of' if folder else ''} {writing[-1]}"
            return "fsync outbox" if name == "fsync" else None

        return label

    for name in DISK:
        _around(os, name, passes, step(name))


def _is_tmpdir(path: object) -> bool:
    return Path(str(path)).name.startswith("relight-")


def _program(argv: Any) -> str:
    return "pump" if any("pump.py" in str(word) for word in argv) else "engine"
