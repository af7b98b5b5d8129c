"""What a person sees: one line for each thing that happens, then the audit and the timeline."""

import os
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from relight.events.bus.journal import merged
from relight.events.decisions import (
    Alarm,
    AnyDecision,
    BoundaryReleased,
    Decision,
    EngineRetired,
    LoadWeights,
    RecoveryFinished,
    RouteAdded,
    RouteFenced,
    StartEngine,
    SyncWeights,
    VerifyEngine,
)
from relight.events.envelope import Entry
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Fact,
    Healthy,
    JobFinished,
    StartFailed,
    StopFailed,
    WeightsFailed,
    WeightsLoaded,
)
from relight.orchestrator import chronicle
from relight.orchestrator.cli.demo.audit import Finding
from relight.orchestrator.cli.demo.evidence import Evidence
from relight.orchestrator.cli.demo.timeline import Phase


class Progress:
    """Lines with the seconds since the demo began; on stderr where stdout is for one JSON object."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line now."""
        write(self.stream, f"[{time.monotonic() - self._began:6.2f} s] {text}\n")

    def show(self, _entry: Entry, message: Fact | Decision) -> None:
        """Print what an entry of the bus tells, if it is of interest here."""
        if text := told(message):
            self.say(f"  {text}")


def write(stream: IO[str], text: str) -> None:
    """Write now. Where nobody reads any more the demo goes on: its exit code still tells what held."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def progress(*, as_json: bool) -> Progress:
    return Progress(sys.stderr if as_json else sys.stdout)


def told(message: Fact | Decision) -> str | None:  # noqa: PLR0912 -- one line a message
    """A message in words; None for those that a spectator can do without."""
    match message:
        case StartEngine(weights=weights):
            how = f"on the snapshot {weights.version}" if weights else "on its base model"
            return f"{_of(message)} is to be started {how}: {_line(message.reason)}"
        case EngineStarted():
            count = len(message.processes)
            return f"{_of(message)} is up after {message.seconds:.1f} s: {count} processes, paused, unproven"
        case StartFailed() | StopFailed() | WeightsFailed():
            detail = message.error if isinstance(message, WeightsFailed) else message.detail
            return f"{_of(message)}: {type(message).__name__}: {_line(detail)}"
        case EngineDead(signal=number, cause=cause, detect_ms=detect_ms):
            how = f"signal {number}" if number is not None else str(cause)
            seen = f", seen {detect_ms:.0f} ms after it" if detect_ms is not None else ""
            return f"{_of(message)} is dead ({how}{seen})"
        case RouteFenced():
            return f"{_of(message)} is fenced: {_line(message.reason)}"
        case EngineStopped(proof=proof):
            return f"{_of(message)} is proven gone: {len(proof.processes)} processes, port {proof.port} free"
        case SyncWeights(version=version, members=members):
            names = ", ".join(f"{member.engine}.{member.incarnation}" for member in members)
            return f"the trainer's boundary is open: sync {version} to {names}"
        case LoadWeights(version=version):
            return f"{_of(message)} is to load {version}"
        case WeightsLoaded(version=version, seconds=seconds):
            return f"{_of(message)} has loaded {version} in {seconds * 1000.0:.0f} ms"
        case VerifyEngine(version=version, reference=reference):
            against = "against the canary's reference" if reference else "by digest and checksums"
            return f"{_of(message)} is to be proven at {version} {against}"
        case Healthy(version=version):
            return f"{_of(message)} is proven at {version}"
        case RouteAdded(version=version, address=address):
            return f"{_of(message)} is routed at {version}, {address}"
        case BoundaryReleased():
            return f"boundary {message.boundary} is released: {message.outcome}"
        case RecoveryFinished(phases=phases, outcome=outcome):
            return f"{message.engine} is recovered ({outcome}) in {phases.total or 0.0:.0f} ms"
        case Alarm():
            return f"ALARM {message.kind}: {_line(message.detail)}"
        case EngineRetired():
            return f"{_of(message)} is retired: {_line(message.reason)}"
        case JobFinished():
            return "the job is finished"
        case _:
            return None


def _of(message: EngineStarted | EngineDead | AnyDecision | Fact | Decision) -> str:
    return f"{getattr(message, 'engine', '?')}.{getattr(message, 'incarnation', '?')}"


def _line(text: str) -> str:
    return text.partition("\n")[0]


def audit(findings: Sequence[Finding], stream: IO[str]) -> None:
    """The audit as a table, and its count."""
    width = max(len(finding.name) for finding in findings)
    print("\nAudit", file=stream)
    for finding in findings:
        mark = "PASS" if finding.passed else "FAIL"
        print(f"  {mark}  {finding.name:<{width}}  {finding.detail}", file=stream)
    passed = sum(finding.passed for finding in findings)
    print(f"\n{passed} of {len(findings)} checks passed", file=stream)


def timeline(phases: Sequence[Phase], stream: IO[str]) -> None:
    """The recovery's phases in milliseconds."""
    print("\nTimeline (ms)", file=stream)
    for phase in phases:
        value = "not known" if phase.ms is None else f"{phase.ms:9.1f}"
        print(f"  {phase.name:<12} {value:>9}  {phase.meaning}", file=stream)


def in_json(evidence: Evidence, findings: Sequence[Finding], phases: Sequence[Phase]) -> dict[str, Any]:
    """The one object that `--json` prints."""
    return {
        "audit": [finding._asdict() for finding in findings],
        "phases": {f"{phase.name}_ms": phase.ms for phase in phases},
        "requests": [
            {
                "mode": turn.mode,
                "token_ids": turn.token_ids,
                "finish_reason": turn.finish_reason,
                "attempts": turn.attempts,
            }
            for turn in evidence.turns
        ],
        "events": [
            chronicle.as_on_bus(entry) for entry in merged(list(evidence.facts), list(evidence.decisions))
        ],
    }
