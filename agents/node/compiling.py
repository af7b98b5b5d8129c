"""Whether an engine that stands still compiles: a compiler runs below it.

vLLM compiles when it meets a new shape, also long after its start, and its core answers nothing meanwhile.
Processor time alone tells nothing (a rank that waits for a lost one spins), a compiler at work does.
"""

from relight.agents.node import proc
from relight.agents.node.tree import Tree

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
