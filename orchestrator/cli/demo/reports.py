"""What the trainer process and the demo say to each other: JSON lines one way, single words the other.

The trainer reports on a descriptor of its own, so that its standard output is what a person would see.
"""

from typing import IO

import msgspec

from relight.orchestrator.cli.demo.evidence import Piece, Tensor, Turn

BEGIN = "begin"
"""Take part in the job: engines serve."""
GO = "go"
"""Send both requests."""
FINISH = "finish"
"""Leave the rollout and end."""


class Report(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One line from the trainer."""


class Stepped(Report, frozen=True, kw_only=True):
    """The optimizer took its one step."""

    loss: float
    largest_change: float
    base: dict[str, Tensor]
    tensors: dict[str, Tensor]


class Synced(Report, frozen=True, kw_only=True):
    """`trainer.sync(step)` returned."""

    run: int
    step: int


class Rolling(Report, frozen=True, kw_only=True):
    """The rollout began: the boundary is open, words are obeyed."""

    steps: int


class Got(Report, frozen=True, kw_only=True):
    """A stream delivered a piece."""

    piece: Piece


class Returned(Report, frozen=True, kw_only=True):
    """A call is complete."""

    turn: Turn


class Broke(Report, frozen=True, kw_only=True):
    """A call failed for good."""

    mode: str
    error: str


class Rolled(Report, frozen=True, kw_only=True):
    """The rollout is over."""

    steps: int
    tensors: dict[str, Tensor]


AnyReport = Stepped | Synced | Rolling | Got | Returned | Broke | Rolled
_decoder: msgspec.json.Decoder[AnyReport] = msgspec.json.Decoder(AnyReport)


def tell(pipe: IO[bytes], report: Report) -> None:
    """Write one report; it is on its way when this returns."""
    pipe.write(msgspec.json.encode(report) + b"\n")
    pipe.flush()


def read(line: bytes) -> AnyReport:
    """One report; raises msgspec.DecodeError."""
    return _decoder.decode(line)
