"""What is searched: each plan one way to hand weights over, one beginning and the faults that may happen."""

from relight.orchestrator.settings import Settings
from tests.search.world import Plan

KINDS = (
    "death",
    "failure",
    "doubled",
    "late",
    "orchestrator",
    "agent",
    "trainer",
    "export",
    "silence",
    "time",
    "operator",
    "bus",
)
"""
death         an engine dies, in any phase
failure       a start, a stop, a load or a proof fails
doubled       a fact is in the stream twice
late          one source's appends wait, while it hears and acts
orchestrator  it dies between two commits or within one, loses a reply, or freezes and commits late
agent         it ends with or without its disk, or between what it writes down and what it says
trainer       it dies and another run begins, or it seems silent
export        the trainer is cut off in an export, or the export fails
silence       a node seems silent
time          a deadline passes early
operator      somebody drains, retires, releases or restarts an engine, restarts all, or holds the job
bus           it is rolled back to any earlier commit, or emptied
"""

PULL = Settings(restarts=2)
PUSH = Settings(restarts=2, recover_at="boundary")


def _plan(
    name: str, faults: int, *kinds: str, warm: bool = True, pushes: bool = False, parts: bool = False
) -> Plan:
    return Plan(name, faults, frozenset(kinds), PUSH if pushes else PULL, pushes, parts, warm)


ONE = (
    _plan("one fault, pulled weights", 1, *KINDS[:-1]),
    _plan("one fault, pushed weights", 1, *KINDS[:-1], pushes=True),
    _plan("one fault from the beginning", 1, *KINDS[:-1], warm=False),
    _plan("one fault of the bus", 1, "bus"),
)
TWO = (
    _plan("two faults, pulled weights", 2, *KINDS[:-1]),
    _plan("two faults, pushed weights", 2, *KINDS[:-1], pushes=True),
    _plan("two faults, one of the bus", 2, "bus", "death", "agent", "trainer"),
    _plan("deaths and failures", 3, "death", "failure", "doubled"),
    _plan("deaths and a trainer's faults", 2, "death", "trainer", "export", "time", pushes=True),
    _plan("deaths and lives of agents", 2, "death", "agent", "orchestrator"),
    _plan("deaths and an operator", 2, "death", "failure", "operator"),
    _plan("deaths and lives from the beginning", 2, "death", "agent", "orchestrator", warm=False),
)
OVER_TWO_NODES = (
    _plan("one engine over both nodes", 2, *KINDS[:-1], parts=True),
    _plan("and one fault of the bus", 2, "bus", "death", "agent", "silence", parts=True),
    _plan("and from the beginning", 2, "death", "failure", "agent", "late", warm=False, parts=True),
)
