"""`make bench-weights`: every figure with its bar, then one line of them; exits 1 when a bar is missed."""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ending
from benchmarks.weights import disk, engines, loop
from benchmarks.weights.figures import Figure


def measured(root: Path, *, long: bool, only: str) -> Iterator[Figure]:
    if only in ("", "disk"):
        yield disk.hashing()
        yield disk.standing_hold(root)
        yield from disk.figures(root, 1)
        if long:
            yield from disk.figures(root, 8)
    if only in ("", "loop"):
        yield from loop.figures(root / "loop")
    if only in ("", "engines") and engines.there():
        yield from engines.boundary_to_route(root / "plain")
        if long:
            for kind in ("tied", "moe"):
                yield from engines.recovered(root / kind, kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="8 GB too, and models that vLLM reloads wrongly")
    parser.add_argument("--only", default="", choices=("", "disk", "loop", "engines"))
    parser.add_argument("--directory", help="on the file system that is measured (the one of TMPDIR)")
    args = parser.parse_args()
    ending.on_sigterm()
    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="relight-bench-", dir=args.directory) as directory:
        for figure in measured(Path(directory), long=args.long, only=args.only):
            print(figure.told(), flush=True)
            found.append(figure)
    missed = [figure.name for figure in found if not figure.met]
    barred = [figure for figure in found if figure.bar is not None]
    told = "; ".join(f"{figure.name} {figure.value:.3g} {figure.unit}".strip() for figure in barred)
    print(f"weights: {told}: {'MISSED: ' + ', '.join(missed) if missed else 'every bar met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
