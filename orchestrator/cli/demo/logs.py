"""Engines' logs, as the agent's log pump wrote them: each line with the wall clock in front of it.

Access lines say who called which route. What a generation was asked for stands in a line of its own in
vLLM's log, and in the access line of the stub.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from relight.events.ids import EngineName
from relight.orchestrator.cli.demo.evidence import Note, Request

_ACCESS = re.compile(r'^(\d+) .*"([A-Z]+) (\S+) HTTP/[\d.]+" (\d{3})')
_NOTES = (
    re.compile(r"Received request (\S+): params: .*?\bmax_tokens=(\d+)"),
    re.compile(r"\brequest_id=(\S+) .*?\bmax_tokens=(\d+)"),
)


class Log(NamedTuple):
    """What the engines logged."""

    requests: tuple[Request, ...]
    notes: tuple[Note, ...]


def read(state_dir: Path) -> Log:
    """The logs under an agent's state directory, incarnation by incarnation."""
    requests: list[Request] = []
    notes: list[Note] = []
    for log in sorted(state_dir.glob("engines/*/*/log")):
        engine, incarnation = log.parent.parent.name, log.parent.name
        if incarnation.isdigit():
            lines = log.read_text(errors="replace").splitlines()
            told = parse(lines, EngineName(engine), int(incarnation))
            requests += told.requests
            notes += told.notes
    return Log(tuple(requests), tuple(notes))


def parse(lines: Iterable[str], engine: EngineName, incarnation: int) -> Log:
    """What the lines of one incarnation say."""
    requests: list[Request] = []
    notes: list[Note] = []
    for line in lines:
        for pattern in _NOTES:
            if note := pattern.search(line):
                told = Note(
                    engine=engine, incarnation=incarnation, request_id=note[1], max_tokens=int(note[2])
                )
                notes.append(told)
        if access := _ACCESS.match(line):
            request = Request(
                engine=engine,
                incarnation=incarnation,
                time_ms=int(access[1]),
                method=access[2],
                path=access[3],
                status=int(access[4]),
            )
            requests.append(request)
    return Log(tuple(requests), tuple(notes))
