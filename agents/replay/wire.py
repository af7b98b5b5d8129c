"""The chunks of `/inference/v1/generate` as vLLM streams them, typed: each is parsed once.

Fields that nobody reads are skipped by the decoder. Candidates are parsed only where they were asked for.
None of these can be part of a cycle, so the collector is not told of them.
"""

import msgspec


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One token that could have stood at a place."""

    token_id: int
    logprob: float
    rank: int | None = None


class Scored(msgspec.Struct, frozen=True, gc=False):
    """A sampled token with its logprob."""

    token_id: int
    logprob: float
    rank: int | None = None


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """A sampled token with its logprob and the candidates at its place."""

    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[Candidate] = []


class ScoredContent(msgspec.Struct, frozen=True, gc=False):
    content: list[Scored] | None = None


class RankedContent(msgspec.Struct, frozen=True, gc=False):
    content: list[Ranked] | None = None


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens `[start, end)` of this request's output were sampled under the label `version`."""

    version: str
    start: int
    end: int


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one chunk brings for one choice."""

    index: int
    token_ids: list[int] | None = None
    logprobs: ScoredContent | RankedContent | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class ScoredDelta(Delta, frozen=True, kw_only=True, gc=False):
    logprobs: ScoredContent | None = None


class RankedDelta(Delta, frozen=True, kw_only=True, gc=False):
    logprobs: RankedContent | None = None


class Failure(msgspec.Struct, frozen=True, gc=False):
    """An error frame."""

    message: str = ""
    type: str = ""
    code: int | str | None = None


class ScoredChunk(msgspec.Struct, frozen=True, gc=False):
    choices: list[ScoredDelta] = []
    request_id: str = ""
    error: Failure | str | None = None


class RankedChunk(msgspec.Struct, frozen=True, gc=False):
    choices: list[RankedDelta] = []
    request_id: str = ""
    error: Failure | str | None = None


Chunk = ScoredChunk | RankedChunk

scored: msgspec.json.Decoder[ScoredChunk] = msgspec.json.Decoder(ScoredChunk)
ranked: msgspec.json.Decoder[RankedChunk] = msgspec.json.Decoder(RankedChunk)
