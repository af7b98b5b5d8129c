"""`relight bus`: an embedded Valkey in the foreground."""

import logging
import os
from argparse import Namespace
from pathlib import Path

from relight.events.bus.embedded import embedded
from relight.events.errors import RelightError
from relight.orchestrator.cli import running

log = logging.getLogger(__name__)


def state_home() -> Path:
    """Where relight keeps what must last, as the XDG base directories say."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "relight"


def run(args: Namespace) -> int:
    directory = Path(args.dir) if args.dir else state_home() / "bus"

    async def main() -> None:
        async with embedded(directory, port=args.port) as server:
            print(server.url, flush=True)
            log.info(
                "bus is up", extra={"url": server.url, "dir": server.directory, "pid": server.process.pid}
            )
            code = await server.ended()
        raise RelightError(f"the bus server on {server.url} ended with code {code}; see {server.log}")

    return running.lasting(main)
