"""`relight ray up|down --config job.toml`: a job's agents in a Ray cluster, begun or ended.

`up` returns once every bundle's agent is on the bus; what it began and what did not come up in time it ends
again. `down` returns once nothing of the job is left that the cluster can reach.
"""

import contextlib
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from relight.agents.adapters.ray import cluster, jobfile
from relight.agents.adapters.ray.holder import Held
from relight.agents.adapters.ray.jobfile import JobFile
from relight.events.bus.client import open_bus
from relight.events.bus.job import Pulse
from relight.events.errors import BusUnavailable, RelightError, UsageError
from relight.events.ids import NodeName, Source, agent_source
from relight.orchestrator.cli import printing, reach, running

T = TypeVar("T")
Show = Callable[[], None]
"""Prints what came of it."""
Pulses = Callable[[], Awaitable[dict[Source, Pulse]]]

POLL_S = 0.2
END_S = 60.0
"""For agents to stop their engines when a job is ended because it did not come up."""


class NotUp(RelightError):
    """The job does not stand. The message says what is lacking."""


def run(args: Namespace) -> int:
    url = reach.bus_url(args)
    file = jobfile.load(Path(args.config))
    command = _up if args.action == "up" else _down
    shows: list[Show] = []
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints what goes on in its cluster
        cluster.connect(file)
        try:
            code = running.once(partial(command, file, url, args, shows.append))
        finally:
            cluster.leave()
    for show in shows:
        show()
    return code


async def _down(file: JobFile, url: str, args: Namespace, then: Callable[[Show], None]) -> None:
    held = await _asked(lambda: _view(file))
    problems = await _asked(lambda: cluster.clear(file, bus_url=url, within_s=args.within))
    if problems:
        raise NotUp(f"job {file.job} is not ended: {'; '.join(problems)}")
    for each in await _asked(lambda: cluster.lost(held)):
        print(f"{each.node} is lost: what ran there is not proven gone", file=sys.stderr)
    if args.format == "json":
        then(partial(printing.as_json, {"job": file.job, "state": "down"}))
    else:
        then(partial(print, f"nothing of job {file.job} is left in the cluster"))


def _view(file: JobFile) -> list[Held]:
    """What stands, as far as anybody tells."""
    try:
        return cluster.view(file)
    except cluster.NotAnswered:
        return []


async def _up(file: JobFile, url: str, args: Namespace, then: Callable[[Show], None]) -> None:
    fresh, stands = False, False
    try:
        async with open_bus(url) as bus:
            fresh = await _asked(lambda: cluster.reserve(file))
            waiting = Waiting(file, url)
            with anyio.move_on_after(args.within):
                await waiting.reserved()
                await waiting.on_the_bus(bus.job(file.job).pulses)
                stands = True
        if not stands:
            raise NotUp(f"job {file.job} does not stand within {args.within:g} s: {waiting.what}")
    finally:
        if fresh and not stands:
            with anyio.CancelScope(shield=True):
                await _asked(lambda: cluster.clear(file, bus_url=url, within_s=END_S))
    then(partial(_show, file, waiting.held, args.format))


class Waiting:
    """What has come, and what is waited for."""

    def __init__(self, file: JobFile, url: str) -> None:
        self._file = file
        self._url = url
        self.what = ""
        self.held: list[Held] = []

    async def reserved(self) -> None:
        """Return when the cluster holds every bundle for the job."""
        while not await _asked(lambda: cluster.is_reserved(self._file)):
            self.what = await _asked(lambda: cluster.lacking(self._file))
            await anyio.sleep(POLL_S)
        self.what = "its actors do not answer"
        await _asked(lambda: cluster.oversee(self._file, bus_url=self._url))

    async def on_the_bus(self, pulses: Pulses) -> None:
        """Return when each bundle's agent has been seen to pulse; raises UsageError. The bus may be away."""
        first: dict[Source, Pulse] = {}
        while True:
            try:
                now = await pulses()
            except BusUnavailable as error:
                self.what = str(error)
                await anyio.sleep(POLL_S)
                continue
            self.held = await _asked(lambda: _view(self._file))
            for each in self.held:
                if each.fatal:
                    raise UsageError(each.problem or "")
            silent = [each for each in self.held if not _pulses(each, now, first)]
            if len(self.held) == self._file.all_bundles and not silent:
                return
            missing = self._file.all_bundles - len(self.held)
            told = [_problem(each) for each in silent]
            self.what = "; ".join([*told, *([f"{missing} actors do not answer"] if missing else [])])
            await anyio.sleep(POLL_S)


def _pulses(held: Held, now: dict[Source, Pulse], first: dict[Source, Pulse]) -> bool:
    """Whether its agent's sign of life has advanced since the first look."""
    source = agent_source(NodeName(held.node))
    pulse = now.get(source)
    if pulse is None or held.agent is None:
        return False
    return first.setdefault(source, pulse) != pulse


def _problem(held: Held) -> str:
    why = held.problem or "its agent is not on the bus yet"
    return f"bundle {held.bundle} on {held.host or 'no node'}: {why}"


async def _asked(call: Callable[[], T]) -> T:
    """Ray's answer, in a thread: its calls block."""
    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)


def _show(file: JobFile, held: list[Held], form: str) -> None:
    if form == "json":
        printing.as_json({"job": file.job, "state": "up", "bundles": [each._asdict() for each in held]})
        return
    print(f"job {file.job} stands in {len(held)} bundles of {jobfile.shown(file.ray.resources)}")
    print()
    head = ("BUNDLE", "NODE", "HOST", "DEVICES", "AGENT", "ENGINES")
    rows = [
        (
            each.bundle,
            each.node,
            each.host,
            ",".join(each.devices) or None,
            each.agent,
            " ".join(each.engines) or "spare",
        )
        for each in held
    ]
    printing.table(head, rows)
