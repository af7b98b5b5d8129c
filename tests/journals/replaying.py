"""The same inputs given to the core as it is now: every decision and every byte of the state is the same."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from relight.orchestrator.core.job import Job, Step
from relight.orchestrator.core.step import committed, step, take_over, tick
from tests.journals import journal
from tests.journals.journal import AnyLine, Bus, Call, Commit, Given


class Replay(NamedTuple):
    """What came of one journal."""

    lines: list[AnyLine]
    """The journal as the core of now would have it."""
    differences: list[str]
    facts: int
    ticks: int
    decisions: int
    compared: int
    """Bytes of decisions and of states."""
    digest: str
    """Over everything that the core gave back."""


def called(job: Job, line: Call) -> Step:
    """One call of the core as it was made."""
    match line.of:
        case "take_over":
            assert line.bus is not None
            return take_over(job, now=line.now, bus=line.bus)
        case "step":
            return step(job, journal.fact_of(line.fact), now=line.now, cause=line.cause)
        case "tick":
            return tick(job, now=line.now)
        case "committed":
            return committed(job, now=line.now)


class _Replaying:
    def __init__(self) -> None:
        self.job: Job | None = None
        self.state: dict[str, str] = {}
        self.pending: list[str] = []
        self.stood: list[str] = []
        self.differences: list[str] = []
        self.compared = 0
        self.told: list[str] = []

    def again(self, number: int, line: AnyLine) -> AnyLine:
        """The line as it comes out now."""
        match line:
            case Given():
                self.job = journal.job_of(line)
                self.state = journal.fields(self.job)
                self.pending.clear()
                return line
            case Call():
                return self._call(number, line)
            case Commit():
                now = msgspec.structs.replace(
                    line, decisions=journal.digest(self.pending), count=len(self.pending)
                )
                if line.stood:
                    self.stood += self.pending
                self.pending.clear()
                return now
            case Bus():
                now = msgspec.structs.replace(
                    line, count=len(self.stood), digest=journal.digest(self.stood), rewritten=line.rewritten
                )
                return now if line.rewritten or now == line else msgspec.structs.replace(now, rewritten=True)

    def _call(self, number: int, line: Call) -> Call:
        assert self.job is not None, "a journal begins with a job"
        done = called(self.job, line)
        state = journal.fields(done.job)
        raws = journal.told(done.decisions)
        now = msgspec.structs.replace(
            line,
            decisions=raws,
            changes=journal.changes(self.state, state),
            digest=journal.state_digest(state),
        )
        texts = [bytes(raw).decode() for raw in raws]
        self.compared += sum(map(len, texts)) + sum(len(text) for text in state.values())
        self.pending += texts
        self.told += [*texts, now.digest]
        self.job, self.state = done.job, state
        return now


def replay(lines: Iterable[AnyLine]) -> Replay:
    """Replay a whole journal; the first differences are told, with what was and what is."""
    again = _Replaying()
    was = list(lines)
    out: list[AnyLine] = []
    for number, line in enumerate(was, start=1):
        now = again.again(number, line)
        out.append(now)
        if journal.written(now) != journal.written(line):
            before, after = journal.written(line).decode(), journal.written(now).decode()
            at = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
            cut = slice(max(0, at - 60), at + 140)
            again.differences.append(f"line {number}: was …{before[cut]!r}, is …{after[cut]!r}")
    calls = [line for line in was if isinstance(line, Call)]
    return Replay(
        lines=out,
        differences=again.differences,
        facts=sum(call.of == "step" for call in calls),
        ticks=sum(call.of == "tick" for call in calls),
        decisions=sum(len(call.decisions) for call in out if isinstance(call, Call)),
        compared=again.compared,
        digest=journal.digest(again.told),
    )


def all_journals() -> list[Path]:
    return sorted(journal.FOLDER.glob("*.jsonl"))


def main() -> None:
    """`python -m tests.journals.replaying`: one digest of each journal, for comparing processes."""
    for path in all_journals():
        print(path.stem, replay(journal.read(path)).digest)


if __name__ == "__main__":
    main()
