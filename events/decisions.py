"""Decisions: what shall be done, said only by the job's orchestrator. Each carries its reason.

Commands are level-triggered: one that comes twice, late or for another incarnation changes nothing.
Every `deadline` is bus time in milliseconds; a receiver turns it into its own monotonic clock.
"""

from typing import Literal

import msgspec

from relight.events.ids import DecisionId, EngineName, EntryId, NodeName, RecoveryId, SyncId
from relight.events.values import Avoided, Canary, Member, Phases, Place, Process, Weights
from relight.events.version import Version


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Root of all decisions."""

    id: DecisionId
    """What an answering fact names in `answers`; also the entry's `id`."""
    epoch: int
    reason: str
    cause: EntryId | None = None
    """The fact it follows from; none where a deadline or a take-over led to it."""
    recovery: RecoveryId | None = None
    dry_run: bool = False
    """Decided and not done: the job is only observed, is on hold, or the recovery waits for an approval.
    Nobody acts on it; whoever is asked for a report may give it, since that changes nothing."""


class ForEngine(Decision, frozen=True, kw_only=True):
    """A decision about one incarnation of one engine."""

    engine: EngineName
    incarnation: int


class RouteFenced(ForEngine, frozen=True, kw_only=True):
    """Send it no more calls."""

    expected_s: float | None = None
    """When a route may be back, if known."""
    drain_s: float = 0.0
    """How long running calls may still finish; 0 frees them at once."""
    planned: bool = False
    """Nothing has died there as far as is known: an operator, a newer run or its weights take it out."""


class RouteAdded(ForEngine, frozen=True, kw_only=True):
    """Send it calls. Also says the new version of a route that stands."""

    address: str
    version: Version


class StopEngine(ForEngine, frozen=True, kw_only=True):
    """Stop it and prove it gone: answered with EngineStopped or StopFailed, by each node that is named."""

    node: NodeName
    processes: tuple[Process, ...] = ()
    """As the orchestrator knows them, for an agent that lost its own record."""
    others: tuple[Place, ...] = ()
    """Further nodes that hold parts of it."""
    drain_s: float = 0.0
    then: Literal["restart", "drained", "retired"] = "restart"
    deadline: int


class StartEngine(ForEngine, frozen=True, kw_only=True):
    """Fill the slot: answered with EngineStarted or StartFailed, by each node that is named."""

    node: NodeName
    parts: tuple[NodeName, ...] = ()
    """The nodes of its further parts, part 1 first."""
    head: str = ""
    """Name or address of the head's node, for the other parts to meet it; empty for an engine on one node."""
    how: Literal["cold", "fork", "standby"] = "cold"
    weights: Weights | None = None
    """To be started on; none for the base model."""
    avoid: tuple[Avoided, ...] = ()
    """Devices that failed again and again: another one is taken where there is one."""
    deadline: int


class ProbeEngine(ForEngine, frozen=True, kw_only=True):
    """Look at it now: answered with Healthy or EngineDead."""

    deadline: int


class ReportRequested(Decision, frozen=True, kw_only=True):
    """Say what is true: answered with NodeUp, or with SafeBoundary as it stands."""

    node: NodeName | None = None
    run: int | None = None
    """The trainer that is asked, where no node is."""
    deadline: int


class SyncWeights(Decision, frozen=True, kw_only=True):
    """Hand the weights of `version` to the members, inside the open boundary that exports it."""

    sync: SyncId
    run: int
    boundary: int
    version: Version
    members: tuple[Member, ...]
    deadline: int


class LoadWeights(ForEngine, frozen=True, kw_only=True):
    """Pull weights: answered with WeightsLoaded or WeightsFailed."""

    sync: SyncId | None = None
    version: Version
    uri: str
    digest: str
    deadline: int


class VerifyEngine(ForEngine, frozen=True, kw_only=True):
    """Reset the prefix cache, resume, run the canary: answered with Healthy or WeightsFailed."""

    version: Version
    digest: str | None = None
    reference: Canary | None = None
    tolerance: float = 0.0
    """Largest allowed absolute difference of any logprob, in nats."""
    deadline: int


class BoundaryReleased(Decision, frozen=True, kw_only=True):
    """The trainer may leave its boundary."""

    run: int
    boundary: int
    outcome: str


class EngineRetired(ForEngine, frozen=True, kw_only=True):
    """The slot is given up until an operator releases it."""


class Alarm(Decision, frozen=True, kw_only=True):
    """A person should look."""

    kind: str
    detail: str


class RecoveryFinished(ForEngine, frozen=True, kw_only=True):
    """The record of one recovery."""

    outcome: Literal["done", "retired", "cancelled", "superseded"]
    phases: Phases


AnyDecision = (
    RouteFenced
    | RouteAdded
    | StopEngine
    | StartEngine
    | ProbeEngine
    | ReportRequested
    | SyncWeights
    | LoadWeights
    | VerifyEngine
    | BoundaryReleased
    | EngineRetired
    | Alarm
    | RecoveryFinished
)
