"""Engines' access logs, as the agent's log pump wrote them: each line with the wall clock in front of it.

vLLM notes a generation's budget in a line of its own just before its access line, the stub in the same one.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from relight.events.ids import EngineName
from relight.orchestrator.cli.demo.case import GENERATE
from relight.orchestrator.cli.demo.evidence import Request

_ACCESS = re.compile(r'^(\d+) .*"([A-Z]+) (\S+) HTTP/[\d.]+" (\d{3})')
_BUDGET = re.compile(r"\bmax_tokens=(\d+)")
_NOTED = re.compile(r"Received request \S+: params: .*?\bmax_tokens=(\d+)")


def read(state_dir: Path) -> tuple[Request, ...]:
    """Every request in the logs under an agent's state directory, incarnation by incarnation."""
    found: list[Request] = []
    for log in sorted(state_dir.glob("engines/*/*/log")):
        engine, incarnation = log.parent.parent.name, log.parent.name
        if incarnation.isdigit():
            lines = log.read_text(errors="replace").splitlines()
            found += requests(lines, EngineName(engine), int(incarnation))
    return tuple(found)


def requests(lines: Iterable[str], engine: EngineName, incarnation: int) -> Iterator[Request]:
    """The requests that these lines tell of."""
    noted: list[int] = []
    for line in lines:
        if note := _NOTED.search(line):
            noted.append(int(note[1]))
        access = _ACCESS.match(line)
        if access is None:
            continue
        budget = None
        if access[3].partition("?")[0] == GENERATE:
            same = _BUDGET.search(line, access.end())
            budget = int(same[1]) if same else noted.pop(0) if noted else None
        yield Request(
            engine=engine,
            incarnation=incarnation,
            time_ms=int(access[1]),
            method=access[2],
            path=access[3],
            status=int(access[4]),
            max_tokens=budget,
        )
