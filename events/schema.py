"""What the orchestrator has committed: the types of the `state` hash. They are wire, read by all.

Plain fields: `commit`, `epoch`, `cursor`, `tail`. JSON fields: `meta`, and `engine:NAME` one an engine.
"""

from typing import Any, Literal

import msgspec

from relight.events.decisions import (
    LoadWeights,
    ProbeEngine,
    ReportRequested,
    StartEngine,
    StopEngine,
    SyncWeights,
    VerifyEngine,
)
from relight.events.ids import BEGINNING, BootId, EngineName, EntryId, NodeName, RecoveryId
from relight.events.values import Canary, Loaded, Phase, Process, Value, Weights
from relight.events.version import Version

Then = Literal["restart", "drained", "retired"]

Command = StartEngine | StopEngine | ProbeEngine | LoadWeights | VerifyEngine
"""What can be open for one engine."""


class Route(Value, frozen=True, kw_only=True):
    """Where clients may send calls, and the version that is proven there."""

    address: str
    version: Version


class Left(Value, frozen=True, kw_only=True):
    """An older incarnation that is not yet proven gone from `node`."""

    incarnation: int
    node: NodeName
    processes: tuple[Process, ...] = ()
    intent: StopEngine | None = None


class Recovery(Value, frozen=True, kw_only=True):
    """One recovery under way, with the bus times (ms) at which its phases ended."""

    id: RecoveryId
    incarnation: int
    """The incarnation that was lost."""
    why: str
    budgeted: bool = True
    """Whether the restart counts against the engine's budget."""
    approved: bool = True
    """Whether it may go on: false in approve mode until an operator says so."""
    detect_ms: float | None = None
    began: int
    marks: dict[str, int] = {}


class Reference(Value, frozen=True, kw_only=True):
    """A canary that stands for a version."""

    version: Version
    canary: Canary
    moved: bool = True
    """Whether it is, in any bit, another one than what the engine computed with the weights before."""
    far: bool | None = None
    """Whether by more than the tolerance; None where that is not known."""
    aside: bool = False
    """It stands on the word of who pushed the weights, not on a proof of them."""


NOWHERE = NodeName("")
"""Of a part that no node has reported yet."""


class Part(Value, frozen=True, kw_only=True):
    """A further part of an engine over several nodes."""

    node: NodeName = NOWHERE
    processes: tuple[Process, ...] = ()
    up: int = 0
    """The incarnation that its node has told to be up there."""
    gone: int = 0
    """The highest incarnation that is proven gone from there, or never was there."""


class EngineState(Value, frozen=True, kw_only=True):
    """One slot."""

    phase: Phase = Phase.NEW
    node: NodeName
    """Of an engine over several nodes: that of its head, which has the server."""
    parts: tuple[Part, ...] = ()
    """Its further parts, part 1 first. All of them and the head are one unit: they start, stop and die
    together."""
    gone: int = 0
    """Of an engine over several nodes: as `Part.gone`, of its head."""
    incarnation: int = 0
    address: str | None = None
    route: Route | None = None
    version: Version | None = None
    """The version whose weights it holds, proven or in proof; none while unknown."""
    digest: str | None = None
    """Digest of what was loaded, where it was told."""
    processes: tuple[Process, ...] = ()
    starts_only: bool = False
    """Published weights reach it by being started on them: its agent found that it reloads wrongly."""
    unreadable: str | None = None
    """Digest of published weights that its node could not read when it was to be started on them."""
    intent: Command | None = None
    """The open step, whole, so that a new epoch can ask for it again."""
    then: Then = "restart"
    """What becomes of the slot once its stop is proven. Of a serving engine's, once the floor allows it."""
    wished: bool = False
    """Whether an operator said so; its agent is told to keep that, so that it outlives this state."""
    kept: Then = "restart"
    """What its agent has confirmed to keep of it."""
    not_before: int = 0
    """Bus time in ms before which it is not started again."""
    restarts: tuple[int, ...] = ()
    """Bus times in ms of the restarts inside the sliding window."""
    left: tuple[Left, ...] = ()
    recovery: Recovery | None = None
    reference: Reference | None = None
    """The last canary that this slot was healthy with."""
    unproven: Reference | None = None
    """What it computes since then at a version of which nothing shows that it holds it; stands for nobody."""
    start_s: float | None = None
    """Seconds that its last good start took."""
    retired_because: str | None = None
    suspected: bool = False
    """A client passes its route over until a decision names it again."""
    since: int = 0
    """Bus time in ms at which it entered its phase."""
    alarmed: bool = False
    """Whether an Alarm has named what it waits for in this phase."""

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        """Where its parts are, the head first."""
        return (self.node, *(part.node for part in self.parts))


class Boundary(Value, frozen=True, kw_only=True):
    """The trainer's open boundary, as it was last told."""

    run: int
    boundary: int
    step: int
    exports: Version | None
    phase: Literal["rollout", "train", "eval", "checkpoint"] = "rollout"
    sync: Literal["all", "stale"] = "stale"
    release: Literal["routed", "written"] = "routed"
    subset: bool = True
    pushes: bool | None = None
    ordered: bool = False
    """Whether a sync was ordered in it."""
    refused: bool = False
    """A sync of `all` was refused in it: it is released, and no other is ordered before the next one."""
    awaiting: tuple[EngineName, ...] = ()
    """Members that must be routed at the new version, or leave, before it is released."""
    released: bool = False


class OpenSync(Value, frozen=True, kw_only=True):
    """The one sync that may be open."""

    order: SyncWeights
    pending: tuple[EngineName, ...]
    """Members that have neither loaded nor left."""


class NodeRecord(Value, frozen=True, kw_only=True):
    """What is known of an agent."""

    boot: BootId
    reported: int = 0
    """The epoch under which it last reported."""
    silent: bool = False
    silent_since: int = 0
    """Bus time in ms at which it was called silent."""
    host: str = ""
    """Name or address under which other machines reach it."""
    asked: ReportRequested | None = None
    spares: int = 0
    """How many more engines it can take, as it last said, less those that were sent there since."""
    spare_parts: bool = False
    """Whether that may be parts of engines over several nodes."""
    each: str = ""
    """What an engine takes up there, for people: `1 GPU`."""
    missed_by: tuple[EngineName, ...] = ()
    """While it is silent: engines of which an Alarm has told that they wait for it or for a spare."""
    worn: dict[str, tuple[int, ...]] = {}
    """Of each device: bus times in ms at which an engine was lost on it, inside the restart window."""


class Meta(Value, frozen=True, kw_only=True):
    """What is true of the job as a whole."""

    bus: str = "none"
    """The server's run id and replication id, by which a rollback is seen."""
    birth: str
    """Random, made with the state, by which an emptied bus is seen."""
    serial: int = 0
    """Counts decisions: the second part of their ids."""
    run: int = 0
    version: Version | None = None
    """The job's version: what an engine must hold to be routed."""
    finished: bool = False
    boundary: Boundary | None = None
    trainer_silent: bool = False
    sync: OpenSync | None = None
    published: Weights | None = None
    """The newest weights that stand, to be pulled."""
    references: tuple[Reference, ...] = ()
    """Canaries of the newest versions."""
    nodes: dict[NodeName, NodeRecord] = {}
    settings: dict[str, Any] = {}
    """Those of the lease holder."""
    hold: bool = False
    """Nothing is done to any engine until the job is released; the trainer's own syncs go on."""
    rolling: tuple[Loaded, ...] = ()
    """Incarnations that are restarted one after the other, the next one when everybody serves."""
    below_floor: int = 0
    """Bus time in ms since which fewer engines serve than the floor; 0 while enough do, or never did."""
    floor_alarmed: bool = False
    counters: dict[str, int] = {}
    """Late, doubled, absent and parked entries, by kind."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the `state` hash."""

    commit: int = 0
    epoch: int = 0
    cursor: EntryId = BEGINNING
    tail: EntryId = BEGINNING
    meta: Meta | None = None
    """None: nothing has been committed on this bus."""
    engines: dict[EngineName, EngineState] = {}

    @property
    def birth(self) -> str | None:
        return self.meta.birth if self.meta else None
