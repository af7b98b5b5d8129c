"""Engines over several nodes, as files describe them: one part on each node, which are one unit.

A job's file describes the whole, with `[[engines.parts]]`; `split` gives each node its own entry.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from relight.events.decisions import StartEngine, StopEngine
from relight.events.errors import UsageError
from relight.events.ids import NodeName

if TYPE_CHECKING:
    from relight.agents.node.config import Engine


def split(engine: "Engine", *, at: str = "") -> "tuple[Engine, ...]":
    """The entry of each node's file, the head's first; of an engine on one node the engine itself.

    Raises UsageError, led by `at`, the path of the engine in its file.
    """
    if isinstance(engine.parts, int):
        return (engine,)
    if not engine.parts:
        raise UsageError(f"{at}parts is empty: an engine on one node has none")
    if engine.part:
        raise UsageError(f"{at}part {engine.part}: the table is the head's, and `parts` are the further ones")
    count = len(engine.parts) + 1
    entries = [replace(engine, parts=count)]
    for number, further in enumerate(engine.parts, start=1):
        entries.append(
            replace(
                engine,
                command=further.command,
                env={**engine.env, **further.env},
                ready=further.ready,
                part=number,
                parts=count,
                port=None,
                after_start=(),
            )
        )
    for entry in entries:
        check(entry, at if entry.part == 0 else f"{at}parts[{entry.part - 1}].")
    return tuple(entries)


def check(engine: "Engine", at: str) -> None:
    """Whether the entry is one node's, and complete; raises UsageError, led by `at`."""
    if not isinstance(engine.parts, int):
        raise UsageError(f"{at}parts: each stands in its own node's file, with `part` and how many `parts`")
    if not 0 <= engine.part < engine.parts:
        raise UsageError(f"{at}part {engine.part} is none of {engine.parts} `parts`, counted from 0")
    if engine.parts > 1 and engine.launcher != "process":
        raise UsageError(f"{at}launcher {engine.launcher!r} starts engines on one node only")
    if engine.part == 0:
        if engine.ready:
            raise UsageError(f"{at}ready {engine.ready!r} is a further part's: a head has to generate")
        return
    given = {"port": engine.port is not None, "after_start": bool(engine.after_start)}
    given["{port}"] = _speaks_of("{port}", engine)
    for what, is_given in given.items():
        if is_given:
            raise UsageError(f"{at}{what} is the head's: part {engine.part} has no server")


def _speaks_of(placeholder: str, engine: "Engine") -> bool:
    texts: Iterable[str] = (*engine.command, *engine.env.values())
    return any(placeholder in text for text in texts)


def addressed(order: StartEngine | StopEngine) -> tuple[NodeName, ...]:
    """The nodes that are to obey it; of a start, the head's first and then each part's."""
    others = order.parts if isinstance(order, StartEngine) else (place.node for place in order.others)
    return (order.node, *others)


def words(engine: "Engine", head: str) -> dict[str, str]:
    """What `{head}`, `{part}` and `{parts}` stand for in the engine's command and environment."""
    if engine.parts == 1:
        return {}
    return {"head": head, "part": str(engine.part), "parts": str(engine.parts)}
