"""What a hung engine looks like, asked by the operator's own command before it is killed.

The command runs beside the engine, as the agent's own helper: it bears no mark of the engine, its time and
its output are bounded, and its output is kept beside the log.
"""

import logging
import os
from pathlib import Path

import anyio

from relight.agents.node import environ
from relight.agents.node.helper import Helper
from relight.agents.node.owned import Owned

log = logging.getLogger(__name__)

SECONDS = 10.0
"""Longest run: so much later the engine is killed at the latest."""
LATE_S = 1.0
"""So long before its deadline a step counts as hung: whoever gave the deadline acts on it at that moment."""
MARGIN_S = 2.0
"""For the helper to end its command."""
LIMIT_BYTES = 4 << 20
"""Of output: thousands of stacks."""
_PROGRAM = Path(__file__).with_name("bounded.py")


def begin(owned: Owned) -> None:
    """Begin to ask, where the node file has a command and something lives that hangs and does not end."""
    if not owned.config.evidence or not owned.living or owned.ending:
        return
    if owned.evidence is not None:
        if owned.evidence.runs:
            return
        owned.evidence.close()
    path = owned.log_path.with_name("evidence")
    command = [environ.filled(word, _words(owned)) for word in owned.config.evidence]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        owned.evidence = Helper(
            _PROGRAM, [str(path), str(LIMIT_BYTES), str(SECONDS), *command], env=environ.cleaned(os.environ)
        )
    except OSError as error:
        log.warning("no evidence could be taken engine=%s error=%s", owned.name, error)
        return
    log.info("evidence is taken engine=%s.%d path=%s", owned.name, owned.record.incarnation, path)


async def gathered(owned: Owned) -> None:
    """Return once what was begun has ended, or had its time."""
    if owned.evidence is not None:
        with anyio.move_on_after(SECONDS + MARGIN_S):
            await owned.evidence.ended()
        owned.evidence.close()
        owned.evidence = None


def _words(owned: Owned) -> dict[str, str]:
    """`{pid}` is its core where there is one, else its front; `{pids}` is all of it, by commas."""
    assert owned.tree is not None
    living = owned.tree.living
    cores = [process for process in living if owned.tree.known[process] == "core"]
    leader = [owned.record.leader] if owned.record.leader in living else []
    first = next(iter((*cores, *leader, *living)), None)
    return {
        "pid": str(first.pid) if first else "0",
        "pids": ",".join(str(process.pid) for process in living),
        "port": str(owned.record.port),
        "incarnation": str(owned.record.incarnation),
    }
