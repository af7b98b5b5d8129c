"""Facts: what happened or what a state is, said by whoever saw it. One frozen struct a type.

The class name is the entry's `type`. Fields are never renamed; new ones have a default.
"""

from typing import Literal

import msgspec

from relight.events.ids import BootId, DecisionId, EngineName, NodeName, RecoveryId, SyncId
from relight.events.values import Canary, Cause, EngineReport, Evidence, Failed, Loaded, Process, Proof
from relight.events.version import Version


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Root of all facts."""


class OfEngine(Fact, frozen=True, kw_only=True):
    """A fact about one incarnation of one engine."""

    engine: EngineName
    incarnation: int


# --- from node agents ------------------------------------------------------------------------------


class NodeUp(Fact, frozen=True, kw_only=True):
    """What an agent sees of every engine it owns. On start, on reconnect, when asked."""

    node: NodeName
    boot: BootId
    host_boot: str = ""
    """The kernel's random boot id."""
    max_epoch: int = 0
    """The highest epoch this agent has obeyed."""
    run: int = 0
    """The highest run this agent has seen."""
    host: str = ""
    """Name or address under which other machines reach the node."""
    engines: tuple[EngineReport, ...] = ()
    spares: int = 0
    spare_parts: bool = False
    """Whether its spares take parts of engines over several nodes."""
    """How many more engines can come."""
    each: str = ""
    """What an engine takes up there, for people: `1 GPU`."""
    answers: DecisionId | None = None


class OfPart(OfEngine, frozen=True, kw_only=True):
    """A fact that the agent of any node with a part of the engine may say."""

    node: NodeName | None = None
    """The node that it speaks of; none for that of the engine's head."""


class EngineStarted(OfPart, frozen=True, kw_only=True):
    """Up, warmed, paused, unproven. Of a further part: its processes run."""

    address: str
    """Empty for a further part, which has no server."""
    how: Literal["cold", "fork", "standby"] = "cold"
    weights: Version | None = None
    """The version it was started on; none for the base model."""
    processes: tuple[Process, ...] = ()
    seconds: float = 0.0
    device: str | None = None
    """The device of its node that it runs on, as the node file names it; none where it names none."""
    reloads: bool | None = None
    """Whether a reload of its weights leaves them as they are; none where that was not tried."""
    answers: DecisionId | None = None


class Healthy(OfEngine, frozen=True, kw_only=True):
    """The canary ran and the weights are proven at `version`."""

    address: str
    version: Version
    canary: Canary | None = None
    evidence: Evidence = {}
    unproven: str | None = None
    """What could not be shown of its weights beyond the bytes handed over; none where enough was."""
    moved: bool = True
    """Of one that is unproven: false where it computes in every bit what it computed before its last load."""
    labelled: bool = False
    """The engine itself told `version`, as its label; else it is what its agent last knew."""
    answers: DecisionId | None = None


class EngineDead(OfPart, frozen=True, kw_only=True):
    """The engine does not serve any more and nobody asked for that."""

    cause: Cause
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    detect_ms: float | None = None
    """From the fault to this fact, where the agent can know."""
    device: str | None = None
    """The device of its node that it ran on, as the node file names it; none where it names none."""


class EngineStopped(OfPart, frozen=True, kw_only=True):
    """The incarnation is proven gone from `node`."""

    node: NodeName  # pyright: ignore[reportGeneralTypeIssues] -- by keyword only: it may be required here
    proof: Proof
    answers: DecisionId | None = None


class StartFailed(OfPart, frozen=True, kw_only=True):
    """The start came to nothing, and what it left is proven gone."""

    cause: str
    retryable: bool = True
    detail: str = ""
    proof: Proof
    device: str | None = None
    """The device of its node that it ran on, as the node file names it; none where it names none."""
    answers: DecisionId | None = None


class StopFailed(OfPart, frozen=True, kw_only=True):
    """No proof that it is gone: the engine stays fenced and no replacement starts."""

    cause: str
    retryable: bool = True
    detail: str = ""
    answers: DecisionId | None = None


class PauseExpired(OfEngine, frozen=True, kw_only=True):
    """A pause outlived its lease; the agent has not resumed the engine by itself."""


class WeightsLoaded(OfEngine, frozen=True, kw_only=True):
    """The load was reported done, of bytes whose digest was `digest`."""

    sync: SyncId | None = None
    version: Version
    digest: str
    seconds: float = 0.0
    answers: DecisionId | None = None


class WeightsFailed(OfEngine, frozen=True, kw_only=True):
    """The load or its proof failed. A touched engine is restarted."""

    sync: SyncId | None = None
    version: Version
    error: str
    touched: bool
    answers: DecisionId | None = None


# --- from trainers ---------------------------------------------------------------------------------


class SafeBoundary(Fact, frozen=True, kw_only=True):
    """A stretch of time in which the trainer runs no optimizer step opens or closes."""

    run: int
    boundary: int
    """Counts within the run."""
    step: int
    version: Version
    """The version that the trainer last synced, or is about to sync."""
    exports: Version | None
    """The version that the live parameters are; none while they are no version."""
    state: Literal["open", "closed"]
    phase: Literal["rollout", "train", "eval", "checkpoint"] = "rollout"
    sync: Literal["all", "stale"] = "stale"
    release: Literal["routed", "written"] = "routed"
    subset: bool = True
    """Whether the transport can sync some members only."""
    pushes: bool | None = None
    """Whether the transport writes into engines itself, so that a sync that is cut off may have touched any
    member; none where nobody can say."""
    cut_off: SyncId | None = None
    """When closing: a sync it could not finish."""
    answers: DecisionId | None = None


class WeightsPublished(Fact, frozen=True, kw_only=True):
    """Weights stand at `uri`, to be pulled. Immutable, kept while any load uses them."""

    sync: SyncId | None = None
    """None when the application wrote them by itself."""
    version: Version
    uri: str
    digest: str


class WeightsSynced(Fact, frozen=True, kw_only=True):
    """A push ended, or a SyncWeights was refused and nothing was touched."""

    sync: SyncId
    version: Version
    digest: str | None = None
    loaded: tuple[Loaded, ...] = ()
    failed: tuple[Failed, ...] = ()


class JobFinished(Fact, frozen=True, kw_only=True):
    """The trainer came to a clean end."""

    run: int


# --- from clients ----------------------------------------------------------------------------------


class RouteSuspected(OfEngine, frozen=True, kw_only=True):
    """A client's call failed there. A hint, never a verdict."""

    error: str


# --- from operators --------------------------------------------------------------------------------


class RestartRequested(Fact, frozen=True, kw_only=True):
    """Restart one engine (`incarnation`: only if it still is that one); without an engine: each that is up,
    one after the other."""

    engine: EngineName | None = None
    incarnation: int | None = None


class DrainRequested(Fact, frozen=True, kw_only=True):
    """Take one engine out: finish its calls, stop it, start no other."""

    engine: EngineName
    incarnation: int | None = None


class ReleaseRequested(Fact, frozen=True, kw_only=True):
    """Take a drained, stopped or retired engine back in; without an engine: end the job's hold."""

    engine: EngineName | None = None
    incarnation: int | None = None


class RetireRequested(Fact, frozen=True, kw_only=True):
    """Take one engine out for good."""

    engine: EngineName
    incarnation: int | None = None


class HoldRequested(Fact, frozen=True, kw_only=True):
    """Do nothing to any engine of the job until it is released."""


class ApprovalGiven(Fact, frozen=True, kw_only=True):
    """Let a waiting recovery go on."""

    recovery: RecoveryId


# --- from the orchestrator, written to `decisions`, read as facts ----------------------------------


class NodeSilent(Fact, frozen=True, kw_only=True):
    """A node's pulse has not advanced for the time that the settings allow."""

    node: NodeName
    since: int
    """Bus time in ms at which its last pulse was seen."""


class TrainerSilent(Fact, frozen=True, kw_only=True):
    """A trainer's pulse has not advanced for the time that the settings allow."""

    run: int
    since: int


AnyFact = (
    NodeUp
    | EngineStarted
    | Healthy
    | EngineDead
    | EngineStopped
    | StartFailed
    | StopFailed
    | PauseExpired
    | WeightsLoaded
    | WeightsFailed
    | SafeBoundary
    | WeightsPublished
    | WeightsSynced
    | JobFinished
    | RouteSuspected
    | RestartRequested
    | DrainRequested
    | ReleaseRequested
    | RetireRequested
    | HoldRequested
    | ApprovalGiven
    | NodeSilent
    | TrainerSilent
)
