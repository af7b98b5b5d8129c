"""How long a trainer waits for what, and what it does then."""

import math
from typing import Literal, get_args

import msgspec

from relight.agents.trainer.barrier import Release

OnLost = Literal["sync", "unsynced", "raise"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Those of one session."""

    orchestrator_grace_s: float = 30.0
    """Longest hold of one boundary by an orchestrator that is absent: ten leases, a host's reboot not."""
    on_lost: OnLost | None = None
    """After the grace: `sync` (hand the weights over without it), `unsynced` (go on, rollouts stay at the
    last version), `raise`. None: `sync` for a push, which needs no orchestrator; else `unsynced` until
    `orphan_deadline_s`, then `raise`."""
    orphan_deadline_s: float = 600.0
    """Seconds without a sign of the orchestrator, or without a word of it on an open sync, after which a
    job that depends on it ends: longer than a redeployment, shorter than a night."""
    max_unsynced_steps: int = 4
    """Syncs in a row that may be left out: rollouts further off-policy than that teach little."""
    release: Release = "routed"
    """When a full sync lets the trainer go: each member `routed`, or the weights only `written`."""
    connect_s: float = 10.0
    """How long a first connection is tried: the bus may be starting beside the trainer."""
    flush_s: float = 5.0
    """How long the end of a session waits for its last facts to be in the stream."""
    rank_deadline_s: float = 600.0
    """How long one rank waits for another inside a call: as long as torch's own collectives do. One whose
    process has ended is noticed at once."""

    def __post_init__(self) -> None:
        for name, choices in (("on_lost", (None, *get_args(OnLost))), ("release", get_args(Release))):
            if getattr(self, name) not in choices:
                named = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {named}, not {getattr(self, name)!r}")
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.type not in (int, float):
                continue
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{field.name} must be a finite number of 0 or more, not {value!r}")
