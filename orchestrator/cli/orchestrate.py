"""`relight orchestrate`: decide for jobs, in the foreground."""

from argparse import Namespace
from pathlib import Path

from relight.events.ids import job_name
from relight.orchestrator import service, settings
from relight.orchestrator.cli import reach, running


def run(args: Namespace) -> int:
    url = reach.bus_url(args)
    jobs = [job_name(name) for name in args.job or ()]
    file = settings.load(Path(args.config)) if args.config else settings.DEFAULT
    if args.observe:
        file = settings.observed(file)

    async def main() -> None:
        await service.serve(bus_url=url, jobs=jobs, settings=file)

    return running.lasting(main, uvloop=True)
