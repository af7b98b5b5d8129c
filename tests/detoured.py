"""relight's command line whose HTTP connections go another way: `python -m tests.detoured PORT:LINK WORDS…`.

What is meant for PORT of a host is connected to LINK of it, as if a wire of this process's own led there.
"""

import sys
from typing import Any

from aiohttp import connector

from relight.orchestrator.cli.main import main


def detour(ports: dict[int, int]) -> None:
    connect: Any = connector.aiohappyeyeballs.start_connection

    async def start_connection(addr_infos: Any, **given: Any) -> Any:
        moved = [
            (*info[:4], (info[4][0], ports.get(info[4][1], info[4][1]), *info[4][2:])) for info in addr_infos
        ]
        return await connect(moved, **given)

    connector.aiohappyeyeballs.start_connection = start_connection


if __name__ == "__main__":
    port, _, link = sys.argv[1].partition(":")
    detour({int(port): int(link)})
    sys.exit(main(sys.argv[2:]))
