"""`python -m benchmarks.replay [PART …]`: all figures, or those of some parts, in one line at the end.

Exits 1 when a bar is missed. Ratios are of one run: both sides alternate on the same machine.
"""

import argparse
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
from benchmarks import ending
from benchmarks.replay import gateway, reading, real, starting
from benchmarks.replay.figures import Figure, line, shown


async def through_the_gateway(root: Path) -> list[Figure]:
    root.mkdir()
    found = await gateway.measure(root)
    return [
        *(
            Figure(f"gateway by direct, {each.route.path}", each.value, "", gateway.LEAST_RATIO)
            for each in found.ratios
        ),
        Figure(f"gateway by direct, {found.short.route.tokens} tokens a stream", found.short.value, ""),
        Figure("gateway, added to a token, p50", found.added_ms, "ms", gateway.MOST_ADDED_MS, "most"),
    ]


PARTS: Mapping[str, Callable[[Path], Awaitable[list[Figure]]]] = {
    "client": reading.measure,
    "start": starting.measure,
    "gateway": through_the_gateway,
    "vllm": real.measure,
}
"""By name: a folder of the part's own, to its figures."""

DESCRIPTORS = 8192
"""A thousand streams, at both of their ends."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    named = parser.parse_args().parts or list(PARTS)
    if unknown := set(named) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))
    ending.on_sigterm()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="relight-replay-") as directory:
        for part in named:
            print(f"{part} …", file=sys.stderr)
            found = anyio.run(PARTS[part], Path(directory) / part)
            print(shown(found), flush=True)
            figures += found
    print(line(figures))
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
