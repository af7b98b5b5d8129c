"""How fast the orchestrator's core is: commits, fences, wake-ups of a thousand jobs, storms, take-overs.

Every part has a server and orchestrator processes of its own. Prints a table and one line of figures; exits 1
when a bar is missed. The machine's load is told with them: where others work too, figures are worse than the
core is, never better.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from benchmarks import ending
from benchmarks.core import commit, fence, takeover, thousand
from benchmarks.core.rig import Result

from relight.events.errors import BusUnavailable

Part = Callable[[Path, bool], Awaitable[Result]]

PARTS: dict[str, Part] = {
    "commit": lambda at, long: commit.measure(at, windows=commit.WINDOWS * (5 if long else 1)),
    "fence": lambda at, long: fence.measure(at, blocks=fence.BLOCKS * (5 if long else 1)),
    "thousand": lambda at, long: thousand.measure(at, samples=thousand.SAMPLES * (3 if long else 1)),
    "takeover": lambda at, long: takeover.measure(at, rounds=takeover.ROUNDS * (10 if long else 1)),
}


async def measure(names: list[str], *, long: bool) -> list[Result]:
    results: list[Result] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"relight-bench-{name}-") as directory:
            print(f"  measuring: {name}", file=sys.stderr)
            results.append(await PARTS[name](Path(directory), long))
        for row, figures in results[-1].figures.items():
            print(f"{row:58} {figures}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"some of {', '.join(PARTS)} (all)")
    parser.add_argument("--long", action="store_true", help="several times the samples")
    args = parser.parse_args()
    ending.on_sigterm()
    before = os.getloadavg()[0]
    try:
        results = anyio.run(lambda: measure(args.parts, long=args.long))
    except BusUnavailable as error:
        print(f"core: not measured: {error}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        return 1
    load = f"{before:.1f} to {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{'load of the machine':58} {load}")
    met = all(result.met for result in results)
    print(f"core: {'; '.join(result.line for result in results)}; bars {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
