"""A further part of an engine over several nodes: processes without a server, which the head alone can prove.

It is up when its process runs, or when its log tells the words that its entry names. What it computes, and
whether it hangs, is seen at the head, whose canary needs every part.
"""

import anyio

from relight.agents.node import stillbirth
from relight.agents.node.launcher import First
from relight.agents.node.owned import Owned

POLL_S = 0.05
"""Between two looks into its log."""
READ_BYTES = 1 << 20
"""Of its log at a time."""


async def running(owned: Owned, first: First) -> None:
    """Until it is up. Raises StartFailure when it ends before. The caller gives the deadline."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stillbirth.awaited, owned, first.processes)
        if owned.config.ready:
            owned.stage = f"its log does not tell {owned.config.ready!r} yet"
            await _told(owned, owned.config.ready.encode())
        assert owned.tree is not None
        owned.tree.find()
        tasks.cancel_scope.cancel()


async def _told(owned: Owned, words: bytes) -> None:
    """Until the log holds `words`; its pump is another process, of which nothing tells what it wrote."""
    at, tail = 0, b""
    while True:
        text = _read(owned, at)
        at += len(text)
        if words in tail + text:
            return
        tail = (tail + text)[-len(words) :]
        if not text:
            await anyio.sleep(POLL_S)


def _read(owned: Owned, at: int) -> bytes:
    try:
        with owned.log_path.open("rb") as log:
            log.seek(at)
            return log.read(READ_BYTES)
    except FileNotFoundError:
        return b""


async def ended(owned: Owned) -> None:
    """Return when nothing of it lives: its head drains, and it ends with its head. The caller gives the
    deadline."""
    if owned.tree is not None:
        await owned.tree.emptied()
