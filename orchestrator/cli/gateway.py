"""`relight gateway`: generation with replay, over HTTP."""

from argparse import Namespace

from relight.agents.replay import gateway
from relight.events.ids import job_name
from relight.orchestrator import collecting
from relight.orchestrator.cli import reach, running


def run(args: Namespace) -> int:
    url, job = reach.bus_url(args), job_name(args.job)
    settings = gateway.Settings(
        host=args.host,
        port=args.port,
        drain_s=args.drain,
        recovery_timeout_s=args.recovery_timeout,
        max_engine_failures=args.max_engine_failures,
    )

    async def main() -> None:
        await gateway.serve(bus_url=url, job=job, settings=settings)

    collecting.spare_what_is_loaded()
    return running.lasting(main, uvloop=True)
