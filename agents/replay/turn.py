"""What a caller gets: a turn with its tokens, where they came from, and the errors that carry one.

A turn's token ids, logprobs and masks have one entry a token and are never padded; its version spans are
in order, do not overlap, and leave out tokens whose version nobody knows.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import msgspec

from relight.agents.replay.wire import Candidate, Ranked, Scored
from relight.events.errors import RelightError
from relight.events.ids import EngineName


class Span(NamedTuple):
    """Output tokens `[start, end)` were sampled by weights of `version` (`RUN.STEP`)."""

    version: str
    start: int
    end: int


class End(StrEnum):
    """Why an attempt ended."""

    COMPLETE = "complete"
    RESET = "reset"
    """The connection broke after the request had been sent."""
    REFUSED = "refused"
    """No connection came about: the engine never saw the request."""
    EOF = "eof"
    """A clean end of the body without a finish reason."""
    DONE_WITHOUT_FINISH = "done_without_finish"
    ERROR_FRAME = "error_frame"
    ERROR_FINISH = "error_finish"
    """Finish reason `error`."""
    ABORTED = "aborted"
    """Finish reason `abort`, which nobody here asked for."""
    SERVER_ERROR = "server_error"
    """A status of 5xx."""
    OVERLOADED = "overloaded"
    """A status of 429, or 503 with Retry-After."""
    EXHAUSTED = "exhausted"
    """This process has no file descriptor left: nothing that an engine could do about."""
    IDLE = "idle"
    """No byte for `idle_timeout_s`."""
    FENCED = "fenced"
    """The orchestrator fenced the route: the engine was lost, as far as is known."""
    WITHDRAWN = "withdrawn"
    """The orchestrator fenced the route of an engine that lives: an operator's wish, a newer run."""
    MALFORMED = "malformed"
    """What came contradicts itself: tokens missing, doubled, or without their logprobs."""
    VERSION_MOVED = "version_moved"
    """Versions are to be the `same`, and the weights changed under way."""
    REJECTED = "rejected"
    """A status of 4xx: the caller's fault, passed on."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One request to one incarnation of one engine, and how it ended."""

    engine: EngineName
    incarnation: int
    version: str
    """The version of its route when it began."""
    request_id: str
    """As it was sent to the engine; it carries the attempt's number."""
    kept: int
    """Tokens of earlier attempts that were sent with the prompt; with several choices always 0."""
    sent: int
    """Length of the prompt that was sent, kept tokens included."""
    max_tokens: int | None
    """What was asked for; none where the caller gave no cap."""
    made: int
    """New tokens that were taken from it, all choices together."""
    seam_drift: float | None = None
    """With `check_seam`: how far its engine's own logprobs of the kept tokens lie from those that stand, at
    most, in nats; only tokens of its route's version are compared."""
    restarted: str | None
    """Why it was replayed from the turn's prompt although tokens were there; none where it was not."""
    reason: End
    detail: str
    started_at: float
    """Unix time in seconds, for people."""
    first_token_s: float | None
    seconds: float


class Choice(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One sampled sequence."""

    token_ids: list[int]
    scored: list[Scored | Ranked] | None
    """What was told of each token as it was sampled; none where no logprobs were asked for."""
    finish_reason: str | None
    stop_reason: int | str | None
    versions: tuple[Span, ...]
    routed_experts: str | None
    """Base64 of a `.npy` over prompt and output, as the last attempt's engine gave it."""
    sampling_mask: list[list[int]] | None

    @cached_property
    def logprobs(self) -> list[float] | None:
        """Natural-log probability of each token."""
        return None if self.scored is None else [entry.logprob for entry in self.scored]

    @cached_property
    def top_logprobs(self) -> list[list[Candidate]] | None:
        """Each token's candidates, the sampled one first; none where `logprobs` asked for none."""
        if self.scored is None or not all(isinstance(entry, Ranked) for entry in self.scored):
            return None
        return [entry.top_logprobs for entry in self.scored if isinstance(entry, Ranked)]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A generation, whole or (in an error) as far as it came. `choices` has more than one for n > 1."""

    request_id: str
    choices: tuple[Choice, ...]
    attempts: tuple[Attempt, ...]

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[float] | None:
        return self.choices[0].logprobs

    @property
    def top_logprobs(self) -> list[list[Candidate]] | None:
        return self.choices[0].top_logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.choices[0].stop_reason

    @property
    def versions(self) -> tuple[Span, ...]:
        return self.choices[0].versions

    @property
    def routed_experts(self) -> str | None:
        return self.choices[0].routed_experts

    @property
    def kept_tokens(self) -> int:
        """Tokens that did not have to be generated again, over all attempts."""
        return sum(attempt.kept for attempt in self.attempts)

    @property
    def complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)


class Piece(NamedTuple):
    """New tokens of one choice.

    `start` is their place in the turn: one below what was delivered before means that the turn is replayed
    from there, and that what stood there is void.
    """

    choice: int
    start: int
    token_ids: list[int]
    scored: Sequence[Scored | Ranked] | None
    """One entry a token; none where no logprobs were asked for."""
    engine: EngineName
    incarnation: int
    attempt: int

    @property
    def logprobs(self) -> list[float] | None:
        return None if self.scored is None else [entry.logprob for entry in self.scored]


class ReplayError(RelightError):
    """A turn that could not be completed. `partial` has all tokens so far."""

    def __init__(self, message: str, partial: Turn) -> None:
        super().__init__(message)
        self.partial = partial


class PoisonRequestError(ReplayError):
    """A turn that was in flight in three deaths: it may be their cause."""


class RequestRejected(ReplayError):
    """An engine refused the request as such (4xx): the caller's fault."""

    def __init__(self, message: str, partial: Turn, *, status: int, body: bytes) -> None:
        super().__init__(message, partial)
        self.status = status
        self.body = body


class ReplayTimeout(ReplayError):
    """The caller's `timeout_s` or `recovery_timeout_s` has passed."""


class NoRoute(ReplayTimeout):
    """No engine of the job was routed, or had room, within `recovery_timeout_s`."""
