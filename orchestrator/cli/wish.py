"""`relight restart|drain|release|retire ENGINE`: a wish on the bus; the orchestrator acts by its rules.

A restart is meant for the incarnation that stands, so that one asked for twice is one. The others are meant
for the slot, whatever fills it by the time they are read.
"""

import getpass
from argparse import Namespace

from relight.events.facts import DrainRequested, Fact, ReleaseRequested, RestartRequested, RetireRequested
from relight.events.ids import EngineName, Source
from relight.events.schema import EngineState
from relight.orchestrator.cli import printing, reach, running

WISHES = {
    "restart": "a restart",
    "drain": "the end of its calls and a stop",
    "release": "a new start",
    "retire": "its end for good",
}
"""Each command, and what it asks for, in words."""


def operator() -> Source:
    """Who wishes."""
    try:
        return Source(f"operator/{getpass.getuser()}")
    except (OSError, KeyError):  # a container's user without a name
        return Source("operator/unknown")


def wish(command: str, name: EngineName, engine: EngineState) -> Fact:
    """The fact that `command` writes."""
    match command:
        case "restart":
            return RestartRequested(engine=name, incarnation=engine.incarnation)
        case "drain":
            return DrainRequested(engine=name)
        case "release":
            return ReleaseRequested(engine=name)
        case "retire":
            return RetireRequested(engine=name)
        case _:
            raise ValueError(f"no such wish: {command}")


def run(args: Namespace) -> int:
    async def main() -> None:
        async with reach.the_job(args) as job:
            name, engine = reach.the_engine(args.engine, job.name, await job.snapshot())
            entry_id = await job.hint(wish(args.command, name, engine), source=operator())
        if args.format == "json":
            printing.as_json({"engine": name, "incarnation": engine.incarnation, "entry_id": entry_id})
        else:
            print(f"asked for {WISHES[args.command]} of {name} incarnation {engine.incarnation} ({entry_id})")

    return running.once(main)
