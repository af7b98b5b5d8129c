"""One sampled sequence as it grows over attempts: what it takes and refuses, and its tokens' versions.

A delta is checked whole before anything of it is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from relight.agents.replay.params import Rules
from relight.agents.replay.turn import Choice, Span
from relight.agents.replay.wire import Delta, Ranked, Scored, VersionSpan
from relight.events.version import Version

WHOLE = frozenset({"stop", "length", "repetition"})
"""Finish reasons of a complete sequence. `repetition` comes only where the caller asked for its detection."""


class Malformed(Exception):
    """What came contradicts itself. `whole`: nothing of this attempt can be trusted, not only this chunk."""

    def __init__(self, detail: str, *, whole: bool = False) -> None:
        super().__init__(detail)
        self.whole = whole


@dataclass(slots=True)
class Strand:
    """One choice. Its tokens from `base` on are of the attempt under way, or of the last one."""

    token_ids: list[int] = field(default_factory=list[int])
    scored: list[Scored | Ranked] = field(default_factory=list[Scored | Ranked])
    masks: list[list[int]] = field(default_factory=list[list[int]])
    spans: list[Span] = field(default_factory=list[Span])
    labels: list[Span] | None = None
    """The engine's own account of this attempt, as places in the turn; it comes with the last chunk."""
    base: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None

    @property
    def made(self) -> int:
        return len(self.token_ids) - self.base

    @property
    def whole(self) -> bool:
        return self.finish_reason in WHOLE

    # --- taking ------------------------------------------------------------------------------------

    def check(self, delta: Delta, rules: Rules) -> list[int]:
        """The token ids of `delta`; raises Malformed where they contradict what came with or before them."""
        token_ids = delta.token_ids
        whole = delta.finish_reason in WHOLE
        if token_ids is None:
            if whole or delta.finish_reason is None:
                raise Malformed("no token ids")
            return []
        total = len(self.token_ids) + len(token_ids)
        if token_ids and self.finish_reason is not None:
            raise Malformed("tokens after the finish", whole=True)
        if whole and total == 0:
            raise Malformed("a finish without a token", whole=True)
        if rules.max_tokens is not None and total > rules.max_tokens:
            raise Malformed(f"more than {rules.max_tokens} tokens", whole=True)
        if delta.sampling_mask is not None and len(delta.sampling_mask) != len(token_ids):
            raise Malformed(f"{len(token_ids)} token ids with {len(delta.sampling_mask)} sampling masks")
        if rules.scored and token_ids:
            _check_scored(token_ids, delta)
        if whole and delta.weight_versions is not None:
            _check_labels(delta.weight_versions, made=total - self.base)
        return token_ids

    def take(self, delta: Delta, count: int, rules: Rules) -> Sequence[Scored | Ranked] | None:
        """Take the first `count` tokens of a checked delta; what was scored beside them."""
        assert delta.token_ids is not None or count == 0
        scored: Sequence[Scored | Ranked] | None = None
        self.token_ids += (delta.token_ids or [])[:count]
        if rules.scored and delta.logprobs is not None and delta.logprobs.content is not None:
            scored = delta.logprobs.content[:count]
            if rules.keeps_scored:
                self.scored += scored
        if delta.sampling_mask is not None:
            self.masks += delta.sampling_mask[:count]
        if delta.weight_versions is not None:
            self.labels = _placed(delta.weight_versions, self.base, len(self.token_ids))
        if delta.routed_experts is not None:
            self.routed_experts = delta.routed_experts
        return scored

    def cut_back(self) -> None:
        """Drop what the attempt under way brought."""
        del self.token_ids[self.base :], self.scored[self.base :], self.masks[self.base :]
        self.finish_reason = self.stop_reason = self.labels = self.routed_experts = None

    # --- versions ----------------------------------------------------------------------------------

    @property
    def told(self) -> bool:
        """The engine has told the version of each token of this attempt, in labels that are versions."""
        return not self.made or (self._covered and all(_version(span.version) for span in self.labels or ()))

    @property
    def _covered(self) -> bool:
        labels = self.labels
        return (
            labels is not None
            and bool(labels)
            and (labels[0].start, labels[-1].end) == (self.base, len(self.token_ids))
        )

    def account(self, certain: Version | None, floor: Version) -> list[Span]:
        """Versions of this attempt's tokens: as the engine told them, else as they are certain, else none.

        Raises Malformed for a label below `floor`, the version that the engine was routed at.
        """
        if not self.made:
            return []
        if not self._covered:
            return [Span(str(certain), self.base, len(self.token_ids))] if certain is not None else []
        known: list[Span] = []
        for label, start, end in self.labels or ():
            version = _version(label)
            if version is not None and version < floor:
                raise Malformed(f"sampled at version {version} on a route of {floor}", whole=True)
            # An engine that nobody labelled says `default`, which proves nothing.
            known.append(Span(str(version or certain or label), start, end))
        return known

    def extend(self, spans: list[Span]) -> None:
        """Add spans behind those that are there; neighbours of one version become one."""
        for span in spans:
            last = self.spans[-1] if self.spans else None
            if last is not None and (last.version, last.end) == (span.version, span.start):
                self.spans[-1] = Span(span.version, last.start, span.end)
            else:
                self.spans.append(span)
        self.labels = None

    def choice(self, rules: Rules) -> Choice:
        """What is there now."""
        return Choice(
            token_ids=list(self.token_ids),
            scored=list(self.scored) if rules.scored and rules.keeps_scored else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            versions=tuple(self.spans),
            routed_experts=self.routed_experts,
            sampling_mask=list(self.masks) if self.masks else None,
        )


def _version(label: str) -> Version | None:
    try:
        return Version.parse(label)
    except ValueError:
        return None


def _check_scored(token_ids: list[int], delta: Delta) -> None:
    content: Sequence[Scored | Ranked] | None = delta.logprobs.content if delta.logprobs is not None else None
    if content is None or len(content) != len(token_ids):
        raise Malformed(f"{len(token_ids)} token ids with {0 if content is None else len(content)} logprobs")
    told = [scored.token_id for scored in content]
    if told != token_ids:
        raise Malformed(f"tokens {token_ids} with the logprobs of {told}")


def _check_labels(labels: list[VersionSpan], *, made: int) -> None:
    """The spans of a finished request cover each of its tokens once: one lost on the way shows here."""
    at = 0
    for label in labels:
        if label.start != at or label.end < label.start:
            raise Malformed(f"version spans have a gap at {at}", whole=True)
        at = label.end
    if at != made:
        raise Malformed(f"{made} tokens came of {at} that were sampled", whole=True)


def _placed(labels: list[VersionSpan], base: int, end: int) -> list[Span]:
    """The engine's spans as places in the turn, none beyond `end`."""
    spans = (Span(label.version, base + label.start, min(base + label.end, end)) for label in labels)
    return [span for span in spans if span.start < span.end]
