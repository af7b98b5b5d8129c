"""Why a start came to nothing: which process ended, and what the machine or its log says of the cause."""

import anyio

from relight.agents.node.errors import StartFailure
from relight.agents.node.logs import last_lines
from relight.agents.node.owned import Owned
from relight.events.values import Process

SEARCH_S = 0.5
"""Between two searches for new processes during a start."""
LAST_WORDS_S = 2.0
"""For the front process to say why, once a process behind it has ended."""
READ_LINES = 200
SHOWN_LINES = 8
SIGNS = (
    ("EADDRINUSE", ("EADDRINUSE", "ddress already in use")),
    (
        "device-busy",
        ("less than desired GPU memory utilization", "CUDA out of memory", "CUDA error: out of memory"),
    ),
)
"""Causes that are no fault of the model or its flags, and the words by which logs tell them."""


async def awaited(owned: Owned, first: tuple[Process, ...]) -> None:
    """Raise StartFailure when a vital process of the start has ended."""
    assert owned.tree is not None
    tree = owned.tree
    while True:
        vital = {process for process, role in tree.known.items() if role != "other"} | {*first}
        dead = vital - set(tree.living)
        if dead:
            raise await _died(owned, sorted(dead)[0])
        with anyio.move_on_after(SEARCH_S):
            await tree.changed()
            continue
        owned.look_around()


async def _died(owned: Owned, process: Process) -> StartFailure:
    assert owned.tree is not None
    tree, role = owned.tree, owned.tree.known.get(process, "other")
    with anyio.move_on_after(LAST_WORDS_S):
        while owned.record.leader in tree.living:
            await tree.changed()
    if owned.pump is not None and not tree.living:
        with anyio.move_on_after(0.5):
            await owned.pump.ended()
    lines = last_lines(owned.log_path, READ_LINES)
    text = "\n".join((f"its {role} (pid {process.pid}) ended while starting", *lines[-SHOWN_LINES:]))
    return StartFailure(_cause(owned, lines), text)


def _cause(owned: Owned, lines: list[str]) -> str:
    assert owned.tree is not None
    killed = any(status.signal == 9 for status in owned.tree.ends.values())
    if killed and owned.shortage.killed():
        return "oom"
    for cause, words in SIGNS:
        if any(word in line for line in lines for word in words):
            return cause
    return "exit"
