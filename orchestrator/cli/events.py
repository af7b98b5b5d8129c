"""`relight events`: facts and decisions of a job in the order of the bus, the last ones and what follows."""

import select
import sys
from argparse import Namespace
from collections.abc import Iterable

import anyio

from relight.events.bus.follow import RETRY_S
from relight.events.bus.job import JobBus
from relight.events.bus.journal import Journal
from relight.events.decisions import AnyDecision
from relight.events.envelope import Entry
from relight.events.errors import BusUnavailable, UsageError
from relight.events.facts import AnyFact
from relight.orchestrator import chronicle
from relight.orchestrator.cli import printing, reach, running

WINDOW = 20_000
"""Entries that are looked through for the last ones of a `--type`."""

_TYPES = {kind.__name__ for kind in (*AnyFact.__args__, *AnyDecision.__args__)}


def run(args: Namespace) -> int:
    types = frozenset(args.type or ())
    if unknown := sorted(types - _TYPES):
        raise UsageError(
            f"no fact or decision is of type {unknown[0]!r}; there are {', '.join(sorted(_TYPES))}"
        )

    async def main() -> None:
        async with reach.the_job(args) as job:
            journal = Journal(job)
            last = await journal.tail(count=WINDOW if types else args.count)
            _show(chronicle.of_types(last, types)[-args.count :], args.format)
            if args.follow:
                await _follow(job, journal, types, args.format)

    return running.lasting(main) if args.follow else running.once(main)


async def _follow(job: JobBus, journal: Journal, types: frozenset[str], form: str) -> None:
    birth, stamp, tries = await job.birth(), await job.bus.stamp(), 0
    while True:
        try:
            batch = await journal.next()
            _somebody_reads()
            if not batch and (now := (await job.birth(), await job.bus.stamp())) != (birth, stamp):
                birth, stamp = now
                journal.restart()
                print("relight: the bus was emptied or is another server", file=sys.stderr)
        except BusUnavailable as error:
            if not tries:
                print(f"relight: {error}; waiting", file=sys.stderr)
            await anyio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1
            continue
        tries = 0
        _show(chronicle.of_types(batch, types), form)


def _show(entries: Iterable[Entry], form: str) -> None:
    for entry in entries:
        if form == "json":
            printing.as_json(chronicle.as_on_bus(entry))
        else:
            print(printing.event(entry), flush=True)


def _somebody_reads() -> None:
    """Raise BrokenPipeError once standard output is a pipe that nobody reads any more."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    if any(happened & select.POLLERR for _, happened in reader.poll(0)):
        raise BrokenPipeError
