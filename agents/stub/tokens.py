"""The stub's language model: pure functions from weights and tokens so far to the next token.

A prefix is the chained hash of every token id so far, so one more token costs one hash, and a token that is
lost, doubled or moved changes all that come after. Weights enter by their digest alone. The invariant:
`reference(digest, prompt + kept)` goes on exactly as `reference(digest, prompt)` did after `kept`.
Logprobs are multiples of 2**-20, so float32, float64 and JSON carry them without rounding.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, NewType

from relight.agents.stub.weights import digest_of, read_folder

VOCABULARY = 512
"""Token ids are 0 to 511, as in the tiny models that tests make."""

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM."""

Prefix = NewType("Prefix", bytes)
Digest = NewType("Digest", str)

EMPTY = Prefix(bytes(16))
_UNIT = 2**20


class Token(NamedTuple):
    """One generated or scored token. `logprob` is finite and negative; the greedy choice has rank 1."""

    token_id: int
    logprob: float
    rank: int


class Sampling(NamedTuple):
    """What besides weights and prefix decides a token; greedy when the temperature is 0."""

    temperature: float = 0.0
    seed: int = 0


GREEDY = Sampling()


def extend(prefix: Prefix, token_id: int) -> Prefix:
    """The prefix with one more token."""
    return Prefix(blake2b(prefix + token_id.to_bytes(8, "little"), digest_size=16).digest())


def prefix_of(token_ids: Iterable[int]) -> Prefix:
    """The prefix that these tokens make."""
    prefix = EMPTY
    for token_id in token_ids:
        prefix = extend(prefix, token_id)
    return prefix


def _draw(digest: Digest, prefix: Prefix, salt: bytes = b"") -> int:
    return int.from_bytes(blake2b(prefix + salt, digest_size=8, key=digest.encode()[:64]).digest(), "little")


def score(digest: Digest, prefix: Prefix, token_id: int) -> Token:
    """`token_id` as these weights see it after `prefix`: in (-0.5, 0) when greedy, else in (-5, -1)."""
    draw = _draw(digest, prefix)
    if draw % VOCABULARY == token_id:
        return Token(token_id, -(1 + (draw >> 9) % (_UNIT // 2)) / _UNIT, 1)
    other = _draw(digest, prefix, token_id.to_bytes(8, "little"))
    return Token(token_id, -(_UNIT + other % (4 * _UNIT)) / _UNIT, 2 + other % (VOCABULARY - 1))


def next_token(
    digest: Digest,
    prefix: Prefix,
    *,
    sampling: Sampling = GREEDY,
    drawn: int = 0,
    banned: Sequence[int] = (),
) -> Token:
    """The token after `prefix`; `drawn` counts what this request drew before.

    A sampled token depends on `drawn`, as it does on a random generator's state: with a seed only a full
    replay repeats the original. `banned` ids (stop tokens below `min_tokens`) are passed over upwards.
    """
    salt = b""
    if sampling.temperature >= GREEDY_BELOW:
        seed = sampling.seed.to_bytes(16, "little", signed=True)
        salt = b"s" + seed + struct.pack("<dq", sampling.temperature, drawn)
    chosen = _draw(digest, prefix, salt) % VOCABULARY
    for _ in range(VOCABULARY):
        if chosen not in banned:
            break
        chosen = (chosen + 1) % VOCABULARY
    return score(digest, prefix, chosen)


def score_prompt(digest: Digest, token_ids: Sequence[int]) -> list[Token | None]:
    """Each prompt token given those before it; None for the first, which nothing precedes."""
    scored: list[Token | None] = []
    prefix = EMPTY
    for position, token_id in enumerate(token_ids):
        scored.append(score(digest, prefix, token_id) if position else None)
        prefix = extend(prefix, token_id)
    return scored


def reference(
    digest: str, token_ids: Sequence[int], max_tokens: int, *, sampling: Sampling = GREEDY
) -> tuple[list[int], list[float]]:
    """What an uninterrupted generation must give: `max_tokens` token ids and their logprobs."""
    prefix = prefix_of(token_ids)
    ids: list[int] = []
    logprobs: list[float] = []
    for drawn in range(max_tokens):
        token = next_token(Digest(digest), prefix, sampling=sampling, drawn=drawn)
        ids.append(token.token_id)
        logprobs.append(token.logprob)
        prefix = extend(prefix, token.token_id)
    return ids, logprobs


def weights_digest(folder: Path | str) -> Digest:
    """The digest of all tensors in a model folder; raises `BadWeights` as the engine's start does."""
    return Digest(digest_of(read_folder(Path(folder))))
