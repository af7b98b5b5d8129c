"""How long a start may take, as the engine's own last good start tells.

Past the learned time a start goes on as long as it is seen to work: its processes compute or its log grows.
One that does neither is wedged, and waiting for the decision's deadline would only cost time. Deadlines
themselves (the decision's, the node file's) hold whatever is seen.
"""

from typing import NamedTuple

import anyio

from relight.agents.node import proc
from relight.agents.node.errors import StartFailure
from relight.agents.node.owned import Owned
from relight.events.bus.clock import monotonic_ms

FACTOR = 4.0
"""A start may take this many times the last good one before it is looked at: caches may be cold again."""
LEAST_S = 60.0
"""No start is looked at sooner, whatever was learned: a busy host stretches short starts most."""
STILL_S = 30.0
"""Nothing for so long is a wedge: the longest silent step of a healthy start is a read from a slow disk."""
WORK = 0.05
"""Of one core, over `STILL_S`: less is what threads use that only wait."""


async def runs_out(owned: Owned) -> None:
    """Raise StartFailure once the start has taken longer than it may, and stands still."""
    good_s = owned.record.good_start_s
    if good_s is None:
        await anyio.sleep_forever()
        raise AssertionError
    began = monotonic_ms()
    await anyio.sleep(max(LEAST_S, FACTOR * good_s))
    while True:
        before = _signs(owned)
        await anyio.sleep(STILL_S)
        now = _signs(owned)
        if now.traces == before.traces and now.cpu_s - before.cpu_s < WORK * STILL_S:
            took_s = (monotonic_ms() - began) / 1000.0
            raise StartFailure(
                "stalled",
                f"not up after {took_s:.0f} s ({owned.stage}), and nothing of it has moved for"
                f" {STILL_S:g} s; its last good start took {good_s:.0f} s",
            )


class _Signs(NamedTuple):
    """What moves in a start that works."""

    traces: tuple[int, int]
    """Bytes of its log, and processes that it ever had."""
    cpu_s: float


def _signs(owned: Owned) -> _Signs:
    try:
        size = owned.log_path.stat().st_size
    except OSError:
        size = 0
    known = len(owned.tree.known) if owned.tree else 0
    stats = [proc.read_stat(process.pid) for process in owned.living]
    return _Signs((size, known), sum(stat.cpu_s for stat in stats if stat is not None))
