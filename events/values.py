"""Values that several messages share. Tuples are JSON arrays on the wire, structs are JSON objects."""

from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec

from relight.events.ids import EngineName, NodeName
from relight.events.version import Version


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object inside a message. Unknown fields are ignored; new fields have defaults."""


class Process(NamedTuple):
    """One process, named so that a reused pid is another one."""

    pid: int
    start: int
    """Clock ticks from the host's boot to the process's start: field 22 of /proc/PID/stat."""


class Place(NamedTuple):
    """A node that holds a part of an engine's incarnation."""

    node: NodeName
    processes: tuple[Process, ...] = ()
    """Of it there, as the orchestrator knows them."""


class Member(NamedTuple):
    """One engine's incarnation in a sync, and where it listens."""

    engine: EngineName
    incarnation: int
    address: str
    """`http://HOST:PORT`"""


class Loaded(NamedTuple):
    """One engine's incarnation."""

    engine: EngineName
    incarnation: int


class Avoided(NamedTuple):
    """Devices of one node, as its node file names them."""

    node: NodeName
    devices: tuple[str, ...]


class Failed(NamedTuple):
    engine: EngineName
    incarnation: int
    error: str
    touched: bool
    """Whether any of its weights may have been written. A touched engine is restarted."""


class Weights(Value, frozen=True, kw_only=True):
    """Weights that can be pulled."""

    version: Version
    uri: str
    """A directory that every reader reaches, as a path or a `file://` URI."""
    digest: str
    """`sha256:HEX` of the manifest, which holds a digest of every file."""


class Canary(Value, frozen=True, kw_only=True):
    """What an engine computes for a fixed token sequence."""

    tokens: tuple[int, ...]
    """Token ids: those of the fixed sequence, then one greedy token."""
    logprobs: tuple[float, ...]
    """Natural-log probabilities of `tokens[1:]`, each given all tokens before it."""
    checksums: str | None = None
    """One digest over the engine's own per-tensor checksums; none where it gives no real ones."""


class Proof(Value, frozen=True, kw_only=True):
    """That an incarnation is gone."""

    processes: tuple[Process, ...] = ()
    """Every recorded or tagged process, each seen to be gone."""
    port: int | None = None
    """The port that could be bound afterwards."""
    port_free: bool = False
    memory_back: bool | None = None
    """Device memory is back; none where the node has no device to ask, or the driver cannot tell."""
    took_ms: float = 0.0
    """From the first signal to the last piece of proof."""


EngineCondition = Literal["absent", "starting", "up", "paused", "stopping", "drained", "retired", "unknown"]


class EngineReport(Value, frozen=True, kw_only=True):
    """What an agent sees of one of its engines."""

    engine: EngineName
    incarnation: int = 0
    """0: never filled."""
    state: EngineCondition
    address: str | None = None
    version: Version | None = None
    processes: tuple[Process, ...] = ()
    reloads: bool | None = None
    """Whether a reload of its weights leaves them as they are; none where that was not tried."""
    part: int = 0
    """Which part of an engine over several nodes this node holds; 0 is the head, which has the server."""
    parts: int = 1
    """How many parts the engine has, each on a node of its own."""


class Cause(StrEnum):
    """Why an engine is dead, as far as its agent knows."""

    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "oom"
    STALL = "stall"
    START = "start"
    ACTOR = "actor"


class Phase(StrEnum):
    """Where an engine's slot is in its life."""

    NEW = "NEW"
    STARTING = "STARTING"
    STALE = "STALE"
    SYNCING = "SYNCING"
    VERIFYING = "VERIFYING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    SILENT = "SILENT"
    STOPPING = "STOPPING"
    BACKOFF = "BACKOFF"
    STOPPED = "STOPPED"
    RETIRED = "RETIRED"


class Phases(Value, frozen=True, kw_only=True):
    """Milliseconds that each phase of one recovery took; none for a phase it did not pass."""

    detect: float | None = None
    """Fault to fact, as the agent knows it."""
    fence: float | None = None
    """To RouteFenced."""
    stop: float | None = None
    """To EngineStopped, the proof within it."""
    start: float | None = None
    """To EngineStarted."""
    boundary: float | None = None
    """To SyncWeights or LoadWeights."""
    sync: float | None = None
    """To WeightsLoaded or WeightsSynced."""
    verify: float | None = None
    """To Healthy."""
    route: float | None = None
    """To RouteAdded."""
    total: float | None = None


Evidence = dict[str, Any]
"""Free-form observations kept for people; nothing is decided on them."""
