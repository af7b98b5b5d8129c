"""Sampling parameters across attempts: what a continuation must ask for, and when none may be asked for.

A continuation sends prompt + kept tokens. It is exact where the next token's distribution depends on those
tokens alone. Whatever also depends on where the output began (penalties, grammars, counters) would start
anew at the seam, and such a turn is replayed from its prompt. The caller's mapping is never changed.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from relight.events.errors import UsageError

Params = Mapping[str, Any]
"""vLLM's SamplingParams by their names there."""

N_MOST = 16_384
"""Sequences of one call; vLLM's own limit."""


def _given(name: str) -> Callable[[Params], bool]:
    return lambda params: bool(params.get(name))


def _set(name: str) -> Callable[[Params], bool]:
    return lambda params: params.get(name) is not None


def _other_than(name: str, neutral: float) -> Callable[[Params], bool]:
    return lambda params: params.get(name) not in (None, neutral)


def _guided(params: Params) -> bool:
    return any(value is not None for name, value in params.items() if name.startswith("guided_"))


REPLAYED: tuple[tuple[Callable[[Params], bool], str], ...] = (
    (lambda params: (params.get("n") or 1) > 1, "n > 1"),
    (_set("structured_outputs"), "guided decoding (structured_outputs)"),
    (_set("response_format"), "guided decoding (response_format)"),
    (_guided, "guided decoding (guided_*)"),
    (_other_than("frequency_penalty", 0), "frequency_penalty"),
    (_other_than("presence_penalty", 0), "presence_penalty"),
    (_other_than("repetition_penalty", 1), "repetition_penalty"),
    (_set("thinking_token_budget"), "thinking budget"),
    (_given("bad_words"), "bad words across the seam"),
    (_set("repetition_detection"), "repetition detection"),
    (_given("trace_decode_token_ids"), "forced tokens"),
)
"""Which parameters forbid a continuation, and how that is called."""


class _Read(msgspec.Struct, frozen=True):
    """The parameters that are reckoned with here, in the types that they must have."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None


class Rules(NamedTuple):
    """What the ledger needs to know of the parameters, read once."""

    n: int
    max_tokens: int | None
    min_tokens: int
    scored: bool
    """Logprobs were asked for."""
    ranked: bool
    """Candidates beside them too."""
    stops: frozenset[int]
    """Token ids that end a sequence, the end-of-sequence token included where it is known."""
    stop_strings: tuple[str, ...]
    replayed: str | None
    """Why no continuation is allowed, whatever happens; none where it is."""
    keeps_scored: bool = True
    """Logprobs are kept for the turn's end, and not only given out as they come."""


def rules(params: Params, *, tokenizer: bool, eos: int | None = None) -> Rules:
    """Read `params`; raises UsageError for what a stream cannot answer."""
    if params.get("prompt_logprobs") is not None or params.get("prompt_logprob_token_ids") is not None:
        raise UsageError(
            "prompt_logprobs are not part of a streamed answer; ask the engine for them directly"
        )
    try:
        read = msgspec.convert(dict(params), _Read)
    except msgspec.ValidationError as error:
        raise UsageError(f"sampling_params: {error}") from error
    if (n := read.n or 1) > N_MOST:
        raise UsageError(f"sampling_params: n {n} is more than {N_MOST}")
    stop = read.stop or ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    why = next((name for forbids, name in REPLAYED if forbids(params)), None)
    if why is None and strings and not tokenizer:
        why = "stop strings without a tokenizer"
    ends = set(read.stop_token_ids or ())
    if eos is not None and not params.get("ignore_eos"):
        ends.add(eos)
    return Rules(
        n=max(1, n),  # less is the engine's to refuse
        max_tokens=read.max_tokens,
        min_tokens=read.min_tokens or 0,
        scored=read.logprobs is not None,
        ranked=bool(read.logprobs),
        stops=frozenset(ends),
        stop_strings=strings,
        replayed=why,
    )


def continued(params: Params, *, kept: int, attempt: int) -> dict[str, Any]:
    """The parameters of attempt number `attempt`, which goes on after `kept` tokens.

    The same seed would draw the random numbers of the turn's first tokens again, so it is derived.
    """
    asked = dict(params)
    if (cap := params.get("max_tokens")) is not None:
        asked["max_tokens"] = cap - kept
    if params.get("min_tokens"):
        asked["min_tokens"] = max(0, params["min_tokens"] - kept)
    if (seed := params.get("seed")) is not None:
        asked["seed"] = derived_seed(seed, attempt)
    return asked


def derived_seed(seed: int, attempt: int) -> int:
    """A seed in `[0, 2**63)` that depends on both and on nothing else."""
    digest = blake2b(f"{seed}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
