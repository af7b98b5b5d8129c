"""`relight explain ENGINE`: the facts, decisions and reasons of its newest recovery, in order."""

from argparse import Namespace

from relight.events.bus.journal import Journal
from relight.events.envelope import Entry
from relight.events.ids import EngineName, RecoveryId
from relight.events.schema import EngineState
from relight.orchestrator import chronicle
from relight.orchestrator.cli import printing, reach, running
from relight.orchestrator.core.moves import no_spare

WINDOW = 20_000
"""Newest entries of each stream that are looked through."""


def run(args: Namespace) -> int:
    async def main() -> None:
        async with reach.the_job(args) as job:
            snapshot = await job.snapshot()
            name, engine = reach.the_engine(args.engine, job.name, snapshot)
            entries = await Journal(job).tail(count=WINDOW)
        recovery, chain = chronicle.explained(entries, name, engine)
        if args.format == "json":
            printing.as_json(chronicle.explained_as_json(name, engine, recovery, chain))
        else:
            show(name, engine, recovery, chain)
            if snapshot.meta and (why := no_spare(snapshot.meta, engine)):
                print(f"waits: {why}")

    return running.once(main)


def show(name: EngineName, engine: EngineState, recovery: RecoveryId | None, chain: list[Entry]) -> None:
    """Print the chain, with times from its first entry by the senders' clocks."""
    print(f"{name} is {engine.phase}, incarnation {engine.incarnation}")
    if engine.retired_because:
        print(f"retired because {engine.retired_because}")
    if recovery is None:
        print("no recovery of it stands on the bus")
        return
    state = "under way" if engine.recovery else "ended"
    why = f": {engine.recovery.why}" if engine.recovery else ""
    print(f"recovery {recovery}, {state}{why}")
    for entry in chain:
        print(printing.event(entry, since_ms=chain[0].time))
    if engine.intent:
        print(f"waits for an answer to {type(engine.intent).__name__}: {engine.intent.reason}")
