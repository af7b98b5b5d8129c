"""Whether an engine that stands still compiles: a compiler runs below it.

vLLM compiles when it meets a new shape, also long after its start, and its core answers nothing meanwhile.
Processor time alone tells nothing (a rank that waits for a lost one spins), a compiler at work does.
"""

import logging

from relight.agents.node import proc
from relight.agents.node.tree import Tree

log = logging.getLogger(__name__)

LONGEST_S = 300.0
"""One stretch of compiling: the largest graphs take minutes; after that it is a stall like any other."""
COMPILERS = frozenset(
    {"cc1", "cc1plus", "gcc", "g++", "c++", "clang", "clang++", "as", "ld", "lld", "ninja"}
    | {"nvcc", "cicc", "ptxas", "fatbinary", "nvlink", "cudafe++", "hipcc", "amdclang++"}
)
_WORKER = "torch/_inductor/compile_worker"
"""Inductor's own pool lives on between two graphs: one of it counts while it computes."""


def compiles(tree: Tree | None) -> bool:
    """Whether a compiler is at work among the engine's processes and what they have started since."""
    if tree is None:
        return False
    stats = proc.all_stats()
    below = {process.pid for process in tree.living}
    while fresh := {stat.pid for stat in stats.values() if stat.ppid in below} - below:
        below |= fresh
    found = [stats[pid] for pid in below if pid in stats]
    return any(
        stat.name in COMPILERS or (stat.state == "R" and _WORKER in proc.command_line(stat.pid))
        for stat in found
    )


class Stretch:
    """One engine's stretch of compiling: from the first compiler seen until it is over.

    Between two compilers, and between the last one's end and the core's first answer, none is seen.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._since: float | None = None
        self._last_seen = 0.0

    def goes_on(self, tree: Tree | None, *, now: float, gap_s: float) -> bool:
        """Whether a compiler is at work, for less than `LONGEST_S`, or was in the last `gap_s` seconds."""
        if compiles(tree):
            if self._since is None:
                self._since = now
                log.info("silent, and compiling engine=%s", self._name)
            self._last_seen = now
        if self._since is None or now - self._since >= LONGEST_S:
            return False
        return now - self._last_seen < gap_s

    def over(self) -> None:
        """It has given a sign of life, or is another one."""
        self._since = None
