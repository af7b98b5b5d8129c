"""The canary: what an engine computes for a fixed token sequence, and when two of them agree."""

import hashlib
from collections.abc import Mapping

from relight.events.values import Canary

PROMPT = (11, 29, 5, 47, 3, 61, 17, 38, 8, 53, 23, 2, 41, 13, 59, 31)
"""Fixed ids below 64, so that every vocabulary has them; no meaning, no repetition."""


def disagreement(canary: Canary, reference: Canary, *, tolerance: float) -> str | None:
    """How `canary` differs from `reference` by more than `tolerance` (nats); None where it does not.

    The last token is the model's own choice: at a near tie another one is no error, so there its logprob
    alone is compared.
    """
    if canary.tokens[:-1] != reference.tokens[:-1] or len(canary.logprobs) != len(reference.logprobs):
        return f"another sequence: {len(reference.tokens)} tokens were expected, {len(canary.tokens)} came"
    for index, (found, wanted) in enumerate(zip(canary.logprobs, reference.logprobs, strict=True)):
        if not abs(found - wanted) <= tolerance:
            token = canary.tokens[index + 1]
            return (
                f"logprob {index} (token {token}) is {found:.6f}, expected {wanted:.6f} within {tolerance:g}"
            )
    if tolerance == 0 and canary.tokens != reference.tokens:
        return f"greedy token {canary.tokens[-1]}, expected {reference.tokens[-1]}"
    if canary.checksums and reference.checksums and canary.checksums != reference.checksums:
        return f"checksums {canary.checksums}, expected {reference.checksums}"
    return None


def combined(checksums: Mapping[str, str]) -> str | None:
    """One sha256 over an engine's per-tensor checksums; None where it has none that are real."""
    if not checksums:
        return None
    whole = hashlib.sha256()
    for name, digest in sorted(checksums.items()):
        whole.update(f"{name}\0{digest}\n".encode())
    return f"sha256:{whole.hexdigest()}"
