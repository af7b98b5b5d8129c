"""When two canaries agree."""

from relight.events.values import Canary


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


def is_same(canary: Canary, other: Canary) -> bool:
    """Whether two canaries of one engine are the same in every bit, as those of the same weights are."""
    return (canary.tokens, canary.logprobs) == (other.tokens, other.logprobs)
