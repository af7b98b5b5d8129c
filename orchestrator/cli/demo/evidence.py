"""What a demo saw, as one frozen value: the only thing that the audit judges.

Everything here was read from the bus, from /proc, from files and from the engines themselves; nothing is
a conclusion. It can be written as JSON and read again, so that a run can be judged after it.
"""

from typing import Literal

import msgspec

from relight.events.envelope import Entry
from relight.events.ids import EngineName, EntryId
from relight.events.values import Process

Fault = Literal["kill-core", "kill-server", "stall", "kill-agent", "kill-orchestrator"]
Mode = Literal["restart", "continue"]
MODES: tuple[Mode, ...] = ("restart", "continue")
Kind = Literal["vllm", "stub"]
RecoverAt = Literal["boundary", "snapshot"]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Root of what was seen."""


class Plan(Seen, frozen=True, kw_only=True):
    """What the demo set out to do."""

    kind: Kind
    engines: tuple[EngineName, ...]
    fault: Fault
    recover_at: RecoverAt
    prompts: dict[Mode, tuple[int, ...]]
    max_tokens: int = 64
    tolerance: float = 1e-4
    """Largest difference allowed between a logprob and its reference, in nats."""


class Generation(Seen, frozen=True, kw_only=True):
    """Tokens and their logprobs (natural logarithm)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Piece(Seen, frozen=True, kw_only=True):
    """One chunk as the client delivered it."""

    mode: Mode
    engine: EngineName
    incarnation: int
    attempt: int
    """0: the first one."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    at_ms: float
    """CLOCK_MONOTONIC, which all processes of one machine share."""


class Attempt(Seen, frozen=True, kw_only=True):
    """One attempt as the turn tells it."""

    engine: EngineName
    incarnation: int
    request_id: str
    """As the client sent it."""
    kept: int
    """Tokens of earlier attempts that it went on from."""
    ended: str


class Turn(Seen, frozen=True, kw_only=True):
    """What a call to `generate` returned."""

    mode: Mode
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    versions: tuple[tuple[str, int, int], ...]
    """Version, first token and the one after the last."""
    attempts: tuple[Attempt, ...]


class Look(Seen, frozen=True, kw_only=True):
    """One engine's incarnation as its own HTTP routes tell it."""

    engine: EngineName
    incarnation: int
    address: str
    label: str
    checksums: dict[str, str]
    generations: dict[Mode, Generation]
    """Uninterrupted greedy generations of the two prompts."""
    processes: tuple[Process, ...]
    """Of its recorded processes, those alive at this moment."""


class Struck(Seen, frozen=True, kw_only=True):
    """One signal that was sent."""

    what: Literal["core", "server", "agent", "orchestrator"]
    process: Process
    signal: int


class Injection(Seen, frozen=True, kw_only=True):
    """The fault, and where the bus stood when it was injected."""

    engine: EngineName
    incarnation: int
    struck: tuple[Struck, ...]
    at_ms: float
    """CLOCK_MONOTONIC."""
    wall_ms: int
    """Wall clock, as in the engines' logs."""
    facts: EntryId
    """The newest fact before it."""
    decisions: EntryId
    """The newest decision before it."""


class Request(Seen, frozen=True, kw_only=True):
    """One line of an engine's access log."""

    engine: EngineName
    incarnation: int
    time_ms: int
    """Wall clock at which the line was written."""
    method: str
    path: str
    """With its query."""
    status: int


class Note(Seen, frozen=True, kw_only=True):
    """What an engine's log says that it was asked to generate."""

    engine: EngineName
    incarnation: int
    request_id: str
    """With the client's own id at its end."""
    max_tokens: int


class Witness(Seen, frozen=True, kw_only=True):
    """Generations that a survivor was asked for directly while the other engine was recovered."""

    engine: EngineName
    complete: int
    broken: int
    """Cut off, aborted or unequal to the survivor's own reference."""


class Tensor(Seen, frozen=True, kw_only=True):
    """One tensor's form and the sha256 of its bytes in hex."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class Snapshot(Seen, frozen=True, kw_only=True):
    """The published snapshot as it stands on disk, hashed by the demo."""

    uri: str
    digest: str
    """Of the manifest as it was read."""
    wrong_files: tuple[str, ...]
    """Files whose size or hash is not the manifest's, with why; files missing in either."""
    files: int
    tensors: dict[str, Tensor]


class Trainer(Seen, frozen=True, kw_only=True):
    """What the trainer process said, and how it ended."""

    run: int
    loss: float
    largest_change: float
    """Largest absolute change of any parameter in the one optimizer step."""
    steps_before: int
    """Optimizer steps taken when the rollout began."""
    steps_after: int
    """The same when it had ended."""
    base: dict[str, Tensor]
    """Parameters before the step."""
    tensors: dict[str, Tensor]
    """Parameters after it."""
    tensors_after: dict[str, Tensor]
    """Parameters when the rollout had ended."""
    exit_code: int | None


class Left(Seen, frozen=True, kw_only=True):
    """What still was there after everything had been stopped."""

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    segments: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()


class Looked(Seen, frozen=True, kw_only=True):
    """How much there was to leave behind: an empty search proves nothing."""

    processes: int
    ports: int
    segments: int
    scratch: int


class Evidence(Seen, frozen=True, kw_only=True):
    """Everything that was seen."""

    plan: Plan
    facts: tuple[Entry, ...]
    decisions: tuple[Entry, ...]
    parked: int
    injections: tuple[Injection, ...]
    """The last one is the one that the requests met; an earlier one came too late for them."""
    before: tuple[Look, ...]
    """Every engine, before the fault."""
    after: tuple[Look, ...]
    """Every engine, after the recovery."""
    old_alive: tuple[Process, ...]
    """Processes of the dead incarnation that were alive after the recovery."""
    pieces: tuple[Piece, ...]
    turns: tuple[Turn, ...]
    requests: tuple[Request, ...]
    notes: tuple[Note, ...]
    witnesses: tuple[Witness, ...]
    snapshot: Snapshot
    trainer: Trainer
    exits: dict[str, tuple[int, ...]]
    """Exit codes of each relight process, one a life; -N: signal N."""
    looked: Looked
    left: Left
