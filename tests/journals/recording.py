"""`python -m tests.journals.recording FILE WORD…`: a relight command whose core is listened to.

It is the real command in a process of its own. Each line is written before the loop gets the answer, so a
process that is killed leaves a journal that ends with its last whole call; its successor appends to it.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from relight.events import codec
from relight.events.bus.job import JobBus
from relight.orchestrator import term
from relight.orchestrator.core.job import Job, Step
from tests.journals import journal
from tests.journals.journal import AnyLine, Call, Commit


class Recorder:
    """Stands between the loop and the core."""

    def __init__(self, path: Path) -> None:
        self._out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._job: Job | None = None
        self._state: dict[str, str] = {}

    def write(self, line: AnyLine) -> None:
        os.write(self._out, journal.written(line))

    def listen(self, name: str) -> None:
        """Write down every call of `name` in the loop's module."""
        inner: Callable[..., Step] = getattr(term, name)

        def heard(job: Job, /, *args: Any, **kwargs: Any) -> Step:
            if self._job is None or job != self._job:
                self.write(journal.given(job))
                self._state = journal.fields(job)
            step = inner(job, *args, **kwargs)
            self._note(name, step, *args, **kwargs)
            return step

        setattr(term, name, heard)

    def _note(
        self, name: Any, step: Step, fact: Any = None, *, now: int, cause: Any = None, bus: str | None = None
    ) -> None:
        state = journal.fields(step.job)
        raw = msgspec.Raw(codec.to_json(fact).encode())
        assert fact is None or journal.fact_of(raw) == fact
        self.write(
            Call(
                of=name,
                now=now,
                bus=bus,
                fact=raw,
                cause=cause,
                decisions=journal.told(step.decisions),
                changes=journal.changes(self._state, state),
                digest=journal.state_digest(state),
            )
        )
        self._job, self._state = step.job, state

    def listen_to_commits(self) -> None:
        inner = JobBus.commit
        told: set[tuple[int, int]] = set()

        async def commit(bus: JobBus, commit: Any, *, lease: Any, source: Any) -> None:
            if (lease.epoch, commit.number) not in told:  # one that is said again after a lost reply is one
                told.add((lease.epoch, commit.number))
                texts = [codec.to_json(each) for each in commit.decisions]
                line = Commit(number=commit.number, decisions=journal.digest(texts), count=len(texts))
                self.write(line)
            await inner(bus, commit, lease=lease, source=source)

        setattr(JobBus, "commit", commit)  # noqa: B010


def main() -> int:
    path, *words = sys.argv[1:]
    if words and words[0] == "orchestrate":
        recorder = Recorder(Path(path))
        for name in ("take_over", "step", "tick", "committed"):
            recorder.listen(name)
        recorder.listen_to_commits()
    from relight.orchestrator.cli.main import main as relight

    return relight(words)


if __name__ == "__main__":
    raise SystemExit(main())
