"""`relight gateway`: token generation with replay, over HTTP."""

from argparse import Namespace

from relight.agents.replay import gateway
from relight.events.ids import job_name
from relight.orchestrator.cli import reach, running


def run(args: Namespace) -> int:
    url, job = reach.bus_url(args), job_name(args.job)

    async def main() -> None:
        await gateway.serve(bus_url=url, job=job, host=args.host, port=args.port)

    return running.lasting(main)
