"""`python -m tests.mutants [--long] [NAME…]`: apply each patch to a copy and see that it is missed.

1 where a mutant lives on. The product as it stands must pass the same seeds, or nothing was found.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants.patches import PATCHES, Patch

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("agents", "events", "orchestrator", "src", "tests")
SHORT_S, LONG_S = 40.0, 600.0
"""For the simulation of one mutant; the search has twice as long after it."""


class Found(NamedTuple):
    patch: Patch
    seconds: float
    found: dict[str, Any] | None
    said: str = ""


@contextmanager
def mutated(patch: Patch | None) -> Iterator[Path]:
    """A copy of the project with the patch applied."""
    with tempfile.TemporaryDirectory(prefix="relight-mutant-") as folder:
        copy = Path(folder)
        for part in PARTS:
            shutil.copytree(
                ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "data")
            )
        if patch is not None:
            apply(patch, copy)
        yield copy


def apply(patch: Patch, root: Path) -> None:
    """Replace the patch's line. Raises ValueError where it is not there exactly once."""
    path = root / patch.path
    text = path.read_text()
    if text.count(patch.before) != 1:
        raise ValueError(f"{patch.name}: {patch.path} has {text.count(patch.before)} times {patch.before!r}")
    path.write_text(text.replace(patch.before, patch.after))


def hunt(patch: Patch, seconds: float) -> Found:
    """Look for what the mutant breaks, in a process of its own."""
    began = time.monotonic()
    with mutated(patch) as copy:
        path = os.pathsep.join((str(copy / "src"), str(copy)))
        done = subprocess.run(
            [sys.executable, "-m", "tests.mutants.hunt", patch.plan, str(seconds)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=4 * seconds + 60.0,
            check=False,
        )
    spent = time.monotonic() - began
    if done.returncode:
        return Found(patch, spent, None, done.stderr[-2000:])
    return Found(patch, spent, json.loads(done.stdout.splitlines()[-1]))


def show(one: Found) -> None:
    if one.found is None:
        print(f"{one.patch.name:<58} LIVES after {one.seconds:.0f} s {one.said}", flush=True)
        return
    needed = f"{one.found['needed']:,} {one.found['unit']}"
    rule = str(one.found["rule"]).splitlines()[0]
    print(f"{one.patch.name:<58} {one.found['by']:<10} {needed:>16}  {rule[:90]}", flush=True)


def main() -> int:
    words = sys.argv[1:]
    seconds = LONG_S if "--long" in words else SHORT_S
    names = [word for word in words if not word.startswith("-")]
    wanted = [patch for patch in PATCHES if not names or any(name in patch.name for name in names)]
    began = time.monotonic()
    founds: list[Found] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for one in pool.map(lambda patch: hunt(patch, seconds), wanted):
            founds.append(one)
            show(one)
    killed = [one for one in founds if one.found is not None]
    by = [one.found["by"] for one in killed if one.found is not None]
    seeds = sorted(one.found["needed"] for one in killed if one.found and one.found["by"] == "simulation")
    print(
        f"mutants: {len(killed)} of {len(founds)} killed, {by.count('simulation')} by the simulation"
        f" ({seeds[len(seeds) // 2] if seeds else 0} seeds in the median, {max(seeds, default=0)} at most),"
        f" {by.count('search')} by the search, {time.monotonic() - began:.0f} s"
    )
    return 0 if killed and len(killed) == len(founds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
