"""`python -m tests.crash_points.victim FOLDER ROLE WORD…`: a relight command that dies where a plan says.

It is the real command in a process of its own; all that is added stands around its effects. Each passing of a
point is one line in the folder's trace, and the death is SIGKILL, from which no code of the command runs on.
"""

import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, cast

import msgspec

from tests.crash_points import effects
from tests.crash_points.points import Committed, Files, Pass, Plan, Point, Role, When

_write = os.write
"""As it is before anything is put around it."""


class Witness:
    """Counts this process's points and ends it at the one that is its own."""

    def __init__(self, files: Files, role: Role) -> None:
        self._files = files
        self._role: Role = role
        self._trace = os.open(files.trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._read: tuple[int, int] | None = None
        self._plan = Plan(0)
        self._deaths = 0
        self._passed: Counter[tuple[When, str]] = Counter()
        self._lock = threading.Lock()
        self._stretch = 0
        self._count_stretches()

    def _count_stretches(self) -> None:
        """What one turn of the event loop does before it asks for the next cannot be interleaved."""
        run = cast(Any, asyncio.Handle)._run

        def counted(handle: asyncio.Handle) -> Any:
            self._stretch += 1
            return run(handle)

        setattr(asyncio.Handle, "_run", counted)  # noqa: B010 -- a private name

    def passes(self, when: When, what: str, *, failed: bool = False, commit: Committed | None = None) -> None:
        """Pass a point; does not return where it is this process's last."""
        with self._lock:
            if not self._is_on():
                return
            self._passed[when, what] += 1
            point = Point(self._role, when, what, self._passed[when, what])
            ours = self._deaths < len(self._plan.deaths) and self._plan.deaths[self._deaths] == point
            dies = ours and self._claims()
            line = Pass(
                case=self._plan.case,
                pid=os.getpid(),
                deaths=self._deaths,
                stretch=self._stretch,
                point=point,
                dies=dies,
                failed=failed,
                commit=commit,
            )
            _write(self._trace, msgspec.json.encode(line) + b"\n")
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_on(self) -> bool:
        """Whether a case is on; what was counted is forgotten when another one, or another death, is due."""
        try:
            stat = self._files.plan.stat()
        except FileNotFoundError:
            return False
        if (stat.st_ino, stat.st_mtime_ns) != self._read:
            self._read = (stat.st_ino, stat.st_mtime_ns)
            plan = msgspec.json.decode(self._files.plan.read_bytes(), type=Plan)
            if plan.case != self._plan.case:
                self._passed.clear()
                self._deaths = 0
            self._plan = plan
        if self._plan.case == 0:
            return False
        while (
            self._deaths < len(self._plan.deaths)
            and self._files.claim(self._plan.case, self._deaths).exists()
        ):
            self._deaths += 1
            self._passed.clear()
        return True

    def _claims(self) -> bool:
        try:
            os.close(os.open(self._files.claim(self._plan.case, self._deaths), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def main() -> int:
    folder, role, *words = sys.argv[1:]
    witness = Witness(Files(Path(folder)), cast(Role, role))
    if role == "orchestrator":
        effects.of_orchestrator(witness.passes)
    else:
        effects.of_agent(witness.passes)
    from relight.orchestrator.cli.main import main as relight

    return relight(words)


if __name__ == "__main__":
    raise SystemExit(main())
