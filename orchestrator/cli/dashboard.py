"""`relight dashboard`: every job of the bus on a page, live; nothing can be changed there."""

from argparse import Namespace

from relight.orchestrator.cli import reach, running
from relight.orchestrator.dashboard.serve import Settings, serve


def run(args: Namespace) -> int:
    url = reach.bus_url(args)
    settings = Settings(host=args.host, port=args.port, allowed=tuple(args.allow_host or ()))

    async def main() -> None:
        await serve(bus_url=url, settings=settings)

    return running.lasting(main)
