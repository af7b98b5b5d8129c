"""TOML files that people write, read so that whatever is wrong with one is a sentence."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from relight.events.errors import UsageError

DEEPEST = 32
"""Tables within tables: no file of ours has more than five."""


def tables(path: Path, *, where: str) -> dict[str, Any]:
    """What stands in the file at `path`; raises UsageError, which begins with `where`."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"{where} is no regular file: it is read anew whenever it is asked for")
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not TOML: {error}") from error
    for at, value in _within(raw, "$", DEEPEST):
        if value is None:
            raise UsageError(f"{where}: {at} is more than {DEEPEST} tables deep")
        if "\0" in at or (isinstance(value, str) and "\0" in value):
            raise UsageError(f"{where}: {at} has a NUL character, which no path, word or variable may have")
    return raw


def _within(value: object, at: str, deepest: int) -> Iterator[tuple[str, object]]:
    """Each value with its place; None for one that lies too deep."""
    inner: list[tuple[str, object]]
    if _is_table(value):
        inner = [(f"{at}.{key}", each) for key, each in value.items()]
    elif _is_list(value):
        inner = [(f"{at}[{index}]", each) for index, each in enumerate(value)]
    else:
        yield at, value
        return
    if deepest == 0:
        yield at, None
        return
    for place, each in inner:
        yield from _within(each, place, deepest - 1)


def _is_table(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)
