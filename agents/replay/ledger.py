"""What a turn has, and what to ask for next. Pure: chunks in, values out.

The invariant: every token a strand holds was checked when it came (its id stands beside its logprob where
those were asked for, and no cap is passed), and is never scored again. An attempt ends by `close`, which
gives its tokens their version; tokens whose version is not certain are never continued.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from relight.agents.replay.drift import Kept
from relight.agents.replay.params import Params, continued, rules
from relight.agents.replay.seam import Decodes, Seam
from relight.agents.replay.strand import WHOLE, Malformed, Strand
from relight.agents.replay.turn import Choice
from relight.agents.replay.wire import Delta, Ranked, Scored
from relight.events.version import Version


class Policy(NamedTuple):
    """What the caller allows."""

    restart: bool = False
    """Always replay from the prompt."""
    same: bool = False
    """One version for the whole turn."""
    keep_routing: bool = True
    """Routing records may be those of a continuation, recomputed for the kept tokens."""


DEFAULT = Policy()


class Ask(NamedTuple):
    """The next request."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    kept: int
    restarted: str | None
    """Why tokens that are there are not continued; none where they are, or where there are none."""


class News(NamedTuple):
    """What one delta added: `token_ids` from place `start` on, with what was scored beside them."""

    choice: int
    start: int
    token_ids: list[int]
    scored: Sequence[Scored | Ranked] | None


class Ledger:
    """One turn. The order of calls is `settle`, `ask`, `feed`…, `close`, and again until `complete`."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: Params,
        *,
        policy: Policy = DEFAULT,
        tokenizer: Decodes | None = None,
        eos: int | None = None,
    ) -> None:
        """`eos`: the end-of-sequence token, where it is known. Raises UsageError for parameters that a
        streamed answer cannot serve.
        """
        self._prompt = list(prompt)
        self._params = dict(params)
        self._rules = rules(params, tokenizer=tokenizer is not None, eos=eos)
        self._policy = policy
        self._tokenizer = tokenizer
        self._strands = [Strand() for _ in range(self._rules.n)]
        self._doubt: str | None = None
        """Why the kept tokens may not be continued, whatever the version."""
        self.taken = 0
        """Tokens that came and were taken, over all attempts, and those of them that were dropped again."""
        self._void = False
        """What is there gives way to the first token that comes."""
        self._seam: Seam | None = None

    # --- asking ------------------------------------------------------------------------------------

    @property
    def ranked(self) -> bool:
        """Candidates were asked for: chunks are to be read with them."""
        return self._rules.ranked

    @property
    def complete(self) -> bool:
        return not self._void and all(strand.whole for strand in self._strands)

    @property
    def made(self) -> int:
        """Tokens of the attempt under way, or of the last one."""
        return sum(strand.made for strand in self._strands)

    @property
    def told(self) -> bool:
        """The engine has told the version of each token of the attempt under way."""
        return all(strand.told for strand in self._strands)

    def settle(self) -> bool:
        """Whether the turn is complete, or its last token ended it though the finish never came."""
        if self._doubt is None and self._policy.keep_routing and not self._void:
            for strand in self._strands:
                if strand.finish_reason is None:
                    strand.finish_reason, strand.stop_reason = self._ended_by(strand.token_ids)
        return self.complete

    def _ended_by(self, token_ids: list[int]) -> tuple[str | None, int | None]:
        if token_ids and token_ids[-1] in self._rules.stops and len(token_ids) >= self._rules.min_tokens:
            return "stop", token_ids[-1]
        if self._rules.max_tokens is not None and len(token_ids) >= self._rules.max_tokens > 0:
            return "length", None
        return None, None

    @property
    def bound(self) -> bool:
        """There are tokens, and all of the turn are to be of their version."""
        return self._policy.same and not self._void and any(strand.token_ids for strand in self._strands)

    def scored_at(self, version: str) -> list[Kept]:
        """The kept tokens that were sampled by `version`, where logprobs were asked for."""
        strand, first = self._strands[0], len(self._prompt)
        return [
            Kept(first + place, strand.token_ids[place], strand.scored[place].logprob)
            for span in strand.spans
            if span.version == version and strand.scored
            for place in range(span.start, span.end)
        ]

    def distrust(self, why: str) -> None:
        """The kept tokens are not to be continued: the next request begins at the prompt."""
        self._doubt = why

    def why_replayed(self, version: str) -> str | None:
        """Why the kept tokens may not be continued at `version`; none where they may, or there are none."""
        if not any(strand.token_ids for strand in self._strands):
            return None
        if self._policy.restart:
            return "mode restart"
        if why := self._rules.replayed or self._doubt:
            return why
        if not self._policy.keep_routing:
            return "routing records are to be of one pass"
        held = {span.version for strand in self._strands for span in strand.spans}
        if self._policy.same and held - {version}:
            return f"version moved from {', '.join(sorted(held))} to {version}"
        return None

    def ask(self, *, attempt: int, version: str) -> Ask:
        """The request of attempt number `attempt` to an engine at `version`.

        A replay from the prompt keeps the old tokens until its first one comes, for the partial's sake.
        """
        why = self.why_replayed(version)
        self._void = self._void or why is not None
        first = self._strands[0]
        kept = 0 if self._void else len(first.token_ids)
        for strand in self._strands:
            strand.base = len(strand.token_ids)
        self._seam = None
        if kept == 0:
            return Ask(list(self._prompt), dict(self._params), 0, why)
        if self._rules.stop_strings and self._tokenizer is not None:
            self._seam = Seam(self._tokenizer, self._rules.stop_strings, first.token_ids)
        asked = continued(self._params, kept=kept, attempt=attempt)
        return Ask(self._prompt + first.token_ids, asked, kept, None)

    # --- feeding -----------------------------------------------------------------------------------

    def feed(self, delta: Delta) -> News | None:
        """Take one delta; what it added, if anything. Raises Malformed, and then has taken nothing of it."""
        if not 0 <= delta.index < len(self._strands):
            raise Malformed(f"choice {delta.index} of {len(self._strands)}", whole=True)
        strand = Strand() if self._void else self._strands[delta.index]
        token_ids = strand.check(delta, self._rules)
        reason, stop = delta.finish_reason, delta.stop_reason
        if self._seam is not None and not self._seam.passed:
            found = self._seam.feed(token_ids)
            if found is not None and len(strand.token_ids) + found.tokens >= self._rules.min_tokens:
                token_ids, reason, stop = token_ids[: found.tokens], "stop", found.stop
        if self._void:
            if not token_ids:
                return None
            self._strands = [Strand() for _ in self._strands]
            self._void, self._doubt = False, None
            strand = self._strands[delta.index]
        start = len(strand.token_ids)
        self.taken += len(token_ids)
        scored = strand.take(delta, len(token_ids), self._rules)
        if reason in WHOLE:
            strand.finish_reason, strand.stop_reason = reason, stop
        return News(delta.index, start, token_ids, scored) if token_ids else None

    # --- ending an attempt -------------------------------------------------------------------------

    def close(self, *, certain: Version | None, floor: Version, doubt: str = "") -> None:
        """End the attempt under way. `certain`: the version of all its tokens, where that is known; `doubt`
        says why it is not. `floor`: its route's version when it began. Raises Malformed for labels below it.
        """
        if self._void:
            return
        known = [strand.account(certain, floor) for strand in self._strands]
        for strand, spans in zip(self._strands, known, strict=True):
            if strand.made and not spans and not strand.whole:
                self._doubt = f"the versions of the kept tokens are not certain: {doubt}"
            strand.extend(spans)

    def reject(self) -> None:
        """Drop everything that the attempt under way brought."""
        if not self._void:
            for strand in self._strands:
                strand.cut_back()

    @property
    def moved(self) -> bool:
        """The turn is complete at more than one version, where it was to be of one."""
        return self._policy.same and len({s.version for strand in self._strands for s in strand.spans}) > 1

    def restart(self) -> None:
        """Replay from the prompt next, complete or not."""
        self._void = True

    def choices(self) -> tuple[Choice, ...]:
        """What is there now."""
        choices = tuple(strand.choice(self._rules) for strand in self._strands)
        if not self._void:
            return choices
        return tuple(
            msgspec.structs.replace(choice, finish_reason=None, stop_reason=None) for choice in choices
        )
