"""The barrier's words: its state, what happens to it, and what follows. `turns` says how.

A pure state machine that says when weights may be exported and what each order of the orchestrator is
answered with. What the session does and what the orchestrator decides go in as events; facts to say come
out; the state tells which order is to be exported next and whether the boundary is released.
The rules it keeps:

- an export runs only inside the open boundary that its order names, and one at a time;
- every order is answered exactly once per asking: exported, refused (nothing touched), or void because
  the close cut it off; an order that was answered before gets the same answer again;
- a decision of a lower epoch than one seen before, or one marked `dry_run`, moves no weights.

Orders for a newer run are not ours to refuse: they mean that another trainer has taken over.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from relight.agents.trainer.sync import Answer
from relight.events.decisions import AnyDecision, SyncWeights
from relight.events.errors import UsageError
from relight.events.facts import Fact, SafeBoundary, TrainerSilent
from relight.events.ids import DecisionId, EngineName, SyncId
from relight.events.schema import Snapshot
from relight.events.values import Member
from relight.events.version import Version

Phase = Literal["rollout", "train", "eval", "checkpoint"]
Scope = Literal["all", "stale"]
Release = Literal["routed", "written"]

NOBODY: frozenset[tuple[EngineName, int]] = frozenset()


class Use(NamedTuple):
    """An engine reads the snapshot of `version`."""

    version: Version
    deadline: int
    """Bus ms by which it has done so."""


ANSWERS_KEPT = 64
"""Orders are asked again within seconds; a run's whole history is not needed."""


class Opened(NamedTuple):
    """The session opens a boundary. No other one is open."""

    step: int
    version: Version
    exports: Version | None
    sync: Scope = "stale"
    phase: Phase = "rollout"
    release: Release = "routed"
    pulls: bool = False
    """Weights are published in this one, to be pulled by whoever lacks them, whatever the transport does."""


class Moved(NamedTuple):
    """What the live parameters are changed inside the boundary."""

    exports: Version | None


class Began(NamedTuple):
    """The session exports the next order now."""


class Ended(NamedTuple):
    """The running export came to this."""

    answer: Answer


class Closed(NamedTuple):
    """The session leaves. An export that still runs is cut off and void, whatever it later reports."""


class CaughtUp(NamedTuple):
    """The state was read: what it holds open is taken like the decisions that may have been missed."""

    snapshot: Snapshot
    tell: bool
    """Say the boundary as it stands: something was missed, and the bus may be another one."""


Event = Opened | Moved | Began | Ended | Closed | CaughtUp | TrainerSilent | AnyDecision


class Barrier(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's side of one run."""

    run: int
    pushes: bool | None = None
    """Whether the transport writes into engines; none without a transport."""
    subset: bool = True
    epoch: int = 0
    """The highest seen."""
    boundary: int = 0
    """Counts openings."""
    opening: Opened | None = None
    """The last one; it stands while `open`."""
    open: bool = False
    waiting: tuple[SyncWeights, ...] = ()
    running: SyncWeights | None = None
    released: str | None = None
    """Outcome of the open boundary, once the orchestrator has said it."""
    observed: bool = False
    """The orchestrator only observes: it would have released the open boundary, and does nothing."""
    heard: int = 0
    """Decisions about the open boundary, those to wait on included: silence is judged by it."""
    patience: int = 0
    """Latest deadline (bus ms) of an order of the open boundary."""
    answers: Mapping[SyncId, Answer] = {}
    gone: frozenset[tuple[EngineName, int]] = NOBODY
    """Members of open orders that were fenced or stopped after the order came."""
    roster: Mapping[EngineName, Member] = {}
    """Engines as last committed: those that are routed, and members of the last orders."""
    uses: Mapping[EngineName, Use] = {}
    """Published weights that engines were told to load or to start on, until they are told something else."""
    recover_at: str = ""
    """Where the orchestrator's settings have a replacement's weights come from; empty while unknown."""
    newer: int | None = None
    """A run above ours that was seen: this trainer's words are void."""


class Step(NamedTuple):
    """What follows from one event: the next state, and facts to say in this order."""

    barrier: Barrier
    facts: tuple[Fact, ...] = ()


def stands(
    barrier: Barrier, *, cut_off: SyncId | None = None, answers: DecisionId | None = None
) -> SafeBoundary:
    """The boundary as it stands. Raises UsageError before the first one."""
    opening = opening_of(barrier)
    return SafeBoundary(
        run=barrier.run,
        boundary=barrier.boundary,
        step=opening.step,
        version=opening.version,
        exports=opening.exports if barrier.open else None,
        state="open" if barrier.open else "closed",
        phase=opening.phase,
        sync=opening.sync,
        release=opening.release,
        subset=barrier.subset or opening.pulls,
        pushes=pushes(barrier),
        cut_off=cut_off,
        answers=answers,
    )


def opening_of(barrier: Barrier) -> Opened:
    """How the last boundary was opened. Raises UsageError before the first one."""
    if barrier.opening is None:
        raise UsageError("no boundary was opened yet")
    return barrier.opening


def pushes(barrier: Barrier) -> bool | None:
    """Whether exports of the last boundary write into engines; none where nobody can say."""
    return False if opening_of(barrier).pulls else barrier.pushes


def heard(barrier: Barrier) -> Barrier:
    """One more word on the open boundary."""
    return replace(barrier, heard=barrier.heard + 1)


def remember(barrier: Barrier, *answers: Answer) -> Barrier:
    """Keep what orders were answered with, the oldest forgotten first."""
    known = {**barrier.answers, **{answer.sync: answer for answer in answers if answer.sync is not None}}
    return replace(barrier, answers=dict(list(known.items())[-ANSWERS_KEPT:]))


def replace(barrier: Barrier, **changes: object) -> Barrier:
    """`barrier` with some fields changed."""
    return msgspec.structs.replace(barrier, **changes)
