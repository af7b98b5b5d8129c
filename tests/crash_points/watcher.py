"""`python -m tests.crash_points.watcher MARK FILE`: who lives, seen from outside, every few milliseconds.

It asks nobody of relight: a process belongs to an incarnation by the tag in its environment or in its title,
and it lives until its descriptor says otherwise. Two incarnations that were alive at one moment are one line.
The order makes that certain: a newcomer is seen alive first, and then the older one is seen alive as well.
"""

import os
import re
import select
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from relight.orchestrator.cli.demo import processes

LOOK_MS = 5
YOUNG_S = 0.5
"""A process may still become the program that it was started for: it is read again for so long."""


class Slot(NamedTuple):
    engine: str
    incarnation: int


class Sight(msgspec.Struct, frozen=True):
    """One line of what was seen."""

    what: Literal["watching", "seen", "gone", "two"]
    slot: Slot
    pid: int = 0
    other: Slot | None = None


class _Held(NamedTuple):
    slot: Slot
    pid: int
    fd: int


class Watch:
    """Every process of the marked engines, held from its first sight to its end."""

    def __init__(self, mark: str, out: Path) -> None:
        self._tag = re.compile(re.escape(mark) + r"\.([a-z0-9-]+)\.(\d+)(?=::|$|\s)")
        self._out = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._held: dict[int, _Held] = {}
        self._strangers: set[int] = set()
        self._young: dict[int, float] = {}
        self._poll = select.poll()
        self._told: set[tuple[Slot, Slot]] = set()
        self._tell(Sight("watching", Slot("", 0)))

    def look(self) -> None:
        """One look; lasts until a known process ends, at most `LOOK_MS`."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
        self._strangers &= pids
        for pid in pids - self._strangers - {held.pid for held in self._held.values()}:
            self._read(pid)
        for fd, _ in self._poll.poll(0):
            self._end(fd)
        self._compare()
        for fd, _ in self._poll.poll(LOOK_MS):
            self._end(fd)

    def _read(self, pid: int) -> None:
        first = self._young.setdefault(pid, time.monotonic())
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self._young.pop(pid, None)
            return
        slot = self._slot(pid)
        if slot is None:
            os.close(fd)
            if time.monotonic() - first > YOUNG_S:
                self._strangers.add(pid)
                self._young.pop(pid, None)
            return
        self._young.pop(pid, None)
        self._held[fd] = _Held(slot, pid, fd)
        self._poll.register(fd, select.POLLIN)
        self._tell(Sight("seen", slot, pid))

    def _slot(self, pid: int) -> Slot | None:
        try:
            environment = (
                Path("/proc", str(pid), "environ").read_bytes().replace(b"\0", b"\n").decode("latin1")
            )
        except OSError:
            return None
        tag = re.search(r"(?:RELIGHT_TAG|VLLM_PROCESS_NAME_PREFIX)=(\S+)", environment)
        match = self._tag.search(f"{tag[1]} " if tag else "") or self._tag.search(processes.title(pid))
        return Slot(match[1], int(match[2])) if match else None

    def _end(self, fd: int) -> None:
        held = self._held.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        self._tell(Sight("gone", held.slot, held.pid))

    def _compare(self) -> None:
        slots = sorted({held.slot for held in self._held.values()})
        for older in slots:
            for newer in slots:
                pair = (older, newer)
                both = older.engine == newer.engine and older.incarnation < newer.incarnation
                if both and pair not in self._told:
                    self._told.add(pair)
                    self._tell(Sight("two", older, other=newer))

    def _tell(self, sight: Sight) -> None:
        os.write(self._out, msgspec.json.encode(sight) + b"\n")


def main() -> None:
    mark, out = sys.argv[1:]
    watch = Watch(mark, Path(out))
    while True:
        watch.look()


if __name__ == "__main__":
    main()
