"""`relight restart ENGINE`: a wish on the bus; the orchestrator acts on it by its rules."""

import getpass
from argparse import Namespace

from relight.events.facts import RestartRequested
from relight.events.ids import Source
from relight.orchestrator.cli import printing, reach, running


def operator() -> Source:
    """Who wishes."""
    try:
        return Source(f"operator/{getpass.getuser()}")
    except (OSError, KeyError):  # a container's user without a name
        return Source("operator/unknown")


def run(args: Namespace) -> int:
    async def main() -> None:
        async with reach.the_job(args) as job:
            name, engine = reach.the_engine(args.engine, job.name, await job.snapshot())
            wish = RestartRequested(engine=name, incarnation=engine.incarnation)
            entry_id = await job.hint(wish, source=operator())
        if args.format == "json":
            printing.as_json({"engine": name, "incarnation": engine.incarnation, "entry_id": entry_id})
        else:
            print(f"asked for a restart of {name} incarnation {engine.incarnation} ({entry_id})")

    return running.once(main)
