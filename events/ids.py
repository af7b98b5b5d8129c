"""Names and numbers that speak of things for all time, as types that cannot be mixed up."""

import re
from typing import NewType

from relight.events.errors import UsageError

JobName = NewType("JobName", str)
"""One training job: a slug. Jobs share a bus and nodes, never keys, routes or processes."""

NodeName = NewType("NodeName", str)
EngineName = NewType("EngineName", str)
"""A replica slot with a lasting name; what fills it changes with each incarnation."""

Source = NewType("Source", str)
"""Who speaks: `agent/NODE`, `trainer/RUN`, `client/…`, `orchestrator/…`, `operator/…`."""

BootId = NewType("BootId", str)
"""One life of an agent's state directory (random), or a trainer's run."""

EntryId = NewType("EntryId", str)
"""The id of a stream entry as the server gave it: `MS-SEQ`. A position, never a time."""

DecisionId = NewType("DecisionId", str)
"""`EPOCH-SERIAL`: unique for all time, also after a rollback of the bus, since epochs never repeat."""

SyncId = NewType("SyncId", str)
RecoveryId = NewType("RecoveryId", str)

BEGINNING = EntryId("0-0")
"""The position before the first entry of any stream."""

_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def job_name(text: str) -> JobName:
    """`text` as a job's name; raises UsageError where it is not a slug."""
    return JobName(_slug("job", text))


def node_name(text: str) -> NodeName:
    """`text` as a node's name; raises UsageError where it is not a slug."""
    return NodeName(_slug("node", text))


def engine_name(text: str) -> EngineName:
    """`text` as an engine's name; raises UsageError where it is not a slug."""
    return EngineName(_slug("engine", text))


def _slug(what: str, text: str) -> str:
    if not _SLUG.fullmatch(text):
        raise UsageError(f"{what} name {text!r} must match [a-z0-9][a-z0-9-]{{0,62}}")
    return text


def agent_source(node: NodeName) -> Source:
    return Source(f"agent/{node}")


def trainer_source(run: int) -> Source:
    return Source(f"trainer/{run}")
