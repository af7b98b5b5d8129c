"""Copies of the project with one line replaced."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.patch import Patch

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("agents", "events", "orchestrator", "src", "tests")


@contextmanager
def mutated(patch: Patch | None) -> Iterator[Path]:
    """A copy of the project with the patch applied."""
    with tempfile.TemporaryDirectory(prefix="relight-mutant-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", "data")
        for part in PARTS:
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=ignored)
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
