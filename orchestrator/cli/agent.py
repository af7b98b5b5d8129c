"""`relight agent`: own the engines of a node file, or one engine whose command stands after `--`."""

from argparse import Namespace
from pathlib import Path

from relight.agents.node import agent, config
from relight.agents.node.hurry import Hurry
from relight.events.errors import UsageError
from relight.orchestrator.cli import reach, running


def node_file(args: Namespace) -> config.NodeFile:
    """What shall run here; raises UsageError."""
    if args.config and (args.rest or args.job or args.name):
        raise UsageError("relight agent takes either --config FILE or --job NAME -- COMMAND, not both")
    if args.config:
        return config.load(Path(args.config))
    if not args.job or not args.rest:
        raise UsageError("relight agent needs --config FILE, or --job NAME and a command after --")
    return config.one_engine(args.job, args.name or "engine-0", args.rest)


def run(args: Namespace) -> int:
    url = reach.bus_url(args)
    node = node_file(args)

    hurry = Hurry()

    async def main() -> None:
        await agent.serve(node, bus_url=url, stop_engines=args.stop_engines, hurry=hurry)

    return running.lasting(main, again=hurry.set if args.stop_engines else None)
