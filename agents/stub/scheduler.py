"""Which sequences run, wait or are held, and what one iteration makes of them. No clock, no I/O.

The invariant: a sequence leaves `running` or `waiting` exactly once, with a finish or, aborted by the
server, in silence; and each iteration gives each running sequence one token, in the order of admission.
"""

from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from relight.agents.stub.knobs import PrefixCache
from relight.agents.stub.tokens import Digest, Prefix, Sampling, extend, next_token, prefix_of
from relight.agents.stub.wire import Add, Made

PauseMode = Literal["abort", "wait", "keep"]
_BLOCK = 16  # tokens of a prompt that make one cached block


class Sequence(msgspec.Struct):
    """One sequence on its way. `stale` is the digest a cached prefix was computed with, if another's."""

    number: int
    index: int
    add: Add
    prefix: Prefix
    sampling: Sampling
    stale: Digest | None = None
    drawn: int = 0

    def advance(self, digest: Digest) -> Made:
        """Draw the next token with these weights."""
        banned = self.add.stop_token_ids if self.drawn < self.add.min_tokens else ()
        token = next_token(
            self.stale or digest, self.prefix, sampling=self.sampling, drawn=self.drawn, banned=banned
        )
        self.prefix = extend(self.prefix, token.token_id)
        self.drawn += 1
        finish: str | None = None
        stop: int | None = None
        if token.token_id in self.add.stop_token_ids and self.drawn >= self.add.min_tokens:
            finish, stop = "stop", token.token_id
        elif self.drawn >= self.add.max_tokens:
            finish = "length"
        return Made(self.number, self.index, token.token_id, token.logprob, token.rank, finish, stop)


class Scheduler:
    """Owns the sequences, the pause state, the prefix cache and the counters of one core."""

    def __init__(self, max_num_seqs: int) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.paused: PauseMode | None = None
        self.iterations = 0
        self.generated = 0
        self.hits = 0
        """Tokens that the prefix cache has answered for."""
        self._max_num_seqs = max_num_seqs
        self._seen: dict[Prefix, Digest] = {}

    @property
    def runnable(self) -> bool:
        """Whether an iteration would make a token."""
        if self.paused is None:
            return bool(self.running or self.waiting)
        return self.paused == "wait" and bool(self.running)

    def add(self, add: Add, digest: Digest, cache: PrefixCache) -> None:
        """Queue a request's sequences."""
        stale: Digest | None = None
        if cache != "off":
            start = prefix_of(add.token_ids[:_BLOCK])
            self.hits += _BLOCK if start in self._seen else 0
            stale = self._seen.setdefault(start, digest)
        prefix = prefix_of(add.token_ids)
        for index, seed in enumerate(add.seeds):
            sampling = Sampling(add.temperature, seed)
            self.waiting.append(Sequence(add.number, index, add, prefix, sampling, stale))

    def abort(self, numbers: Iterable[int]) -> None:
        """Drop requests in silence."""
        gone = set(numbers)
        self.running = [sequence for sequence in self.running if sequence.number not in gone]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.number not in gone)

    def pause(self, mode: PauseMode) -> list[Made]:
        """Hold the queue; `abort` also ends all requests and answers with their ends."""
        self.paused = mode
        if mode != "abort":
            return []
        ended = [
            Made(sequence.number, sequence.index, -1, 0.0, 0, "abort")
            for sequence in (*self.running, *self.waiting)
        ]
        self.running, self.waiting = [], deque()
        return ended

    def reset_cache(self, cache: PrefixCache, *, preempt: bool) -> bool:
        """Forget cached prefixes; False, with nothing forgotten, while running sequences hold them."""
        if self.running and not preempt:
            return False
        if cache != "sticky":
            self._seen.clear()
            for sequence in (*self.running, *self.waiting):
                sequence.stale = None
        return True

    def step(self, digest: Digest, limit: int | None) -> tuple[list[Made], list[Sequence]]:
        """One iteration, of at most `limit` tokens: what was made, and the sequences admitted for it."""
        admitted: list[Sequence] = []
        while self.paused is None and self.waiting and len(self.running) < self._max_num_seqs:
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        made: list[Made] = []
        left: list[Sequence] = []
        for sequence in self.running:
            if limit is not None and len(made) >= limit:
                left.append(sequence)
                continue
            made.append(sequence.advance(digest))
            if made[-1].finish is None:
                left.append(sequence)
        self.running = left
        self.iterations += 1
        self.generated += len(made)
        return made, admitted
