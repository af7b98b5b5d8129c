"""Checks of the turns that the two callers got: the samples a trainer would learn from."""

import math
from collections.abc import Sequence

from relight.orchestrator.cli.demo.checks.case import Case, Check, Verdict, verdict
from relight.orchestrator.cli.demo.evidence import MODES, Generation, Mode


def _both(case: Case) -> Verdict:
    modes = sorted(turn.mode for turn in case.evidence.turns)
    return Verdict(modes == sorted(MODES), f"modes returned: {', '.join(modes) or 'none'}")


def _counts(case: Case) -> Verdict:
    counts = {turn.mode: len(turn.token_ids) for turn in case.evidence.turns}
    wrong = [f"{mode} has {count}" for mode, count in counts.items() if count != case.plan.max_tokens]
    return verdict(wrong, f"{case.plan.max_tokens} tokens each")


def _finished(case: Case) -> Verdict:
    wrong = [
        f"{turn.mode} ended by {turn.finish_reason}"
        for turn in case.evidence.turns
        if turn.finish_reason != "length"
    ]
    return verdict(wrong, "finish_reason length")


def _finite(case: Case) -> Verdict:
    wrong: list[str] = []
    for turn in case.evidence.turns:
        if len(turn.logprobs) != len(turn.token_ids):
            wrong.append(f"{turn.mode}: {len(turn.logprobs)} logprobs for {len(turn.token_ids)} tokens")
        odd = [value for value in turn.logprobs if not (math.isfinite(value) and value <= 0.0)]
        wrong += [f"{turn.mode}: logprob {value}" for value in odd[:1]]
    lowest = min((value for turn in case.evidence.turns for value in turn.logprobs), default=math.nan)
    return verdict(wrong, f"one a token, lowest {lowest:.3f}")


def _references(case: Case, mode: Mode) -> Generation:
    look = case.look(case.evidence.before, case.dead)
    return look.generations[mode] if look else Generation(token_ids=(), logprobs=())


def _tokens_equal(case: Case) -> Verdict:
    wrong: list[str] = []
    for mode in MODES:
        turn, reference = case.turn(mode).token_ids, _references(case, mode).token_ids
        differing = [at for at, pair in enumerate(zip(turn, reference, strict=False)) if pair[0] != pair[1]]
        if differing or not reference:
            wrong.append(f"{mode} differs from token {differing[0] if differing else 0} on")
    return verdict(wrong, "token for token")


def _logprobs_equal(case: Case) -> Verdict:
    largest = {mode: distance(case.turn(mode).logprobs, _references(case, mode).logprobs) for mode in MODES}
    wrong = [f"{mode} is off by {off:.2g}" for mode, off in largest.items() if off > case.plan.tolerance]
    return verdict(wrong, f"largest difference {max(largest.values()):.2g}, allowed {case.plan.tolerance:g}")


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference between finite numbers at the same place; 0 where there is none."""
    pairs = zip(left, right, strict=False)
    return max((abs(a - b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)), default=0.0)


def _covered(case: Case) -> Verdict:
    wrong: list[str] = []
    for turn in case.evidence.turns:
        edges = [0, *(edge for _, start, end in turn.versions for edge in (start, end)), len(turn.token_ids)]
        if any(left != right for left, right in zip(edges[::2], edges[1::2], strict=True)):
            wrong.append(f"{turn.mode} has spans {list(turn.versions)}")
    return verdict(wrong, f"spans go from 0 to {case.plan.max_tokens} without a gap")


def _one_version(case: Case) -> Verdict:
    told = {version for turn in case.evidence.turns for version, _, _ in turn.versions}
    return verdict(sorted(told - {str(case.version)}), f"every span is of {case.version}")


CHECKS = (
    Check("both requests returned", _both),
    Check("each has its full count of tokens", _counts),
    Check("each ended by its length", _finished),
    Check("a finite logprob for each token", _finite),
    Check("tokens equal the references", _tokens_equal),
    Check("logprobs equal the references", _logprobs_equal),
    Check("version spans cover every token", _covered),
    Check("every span is of the synced version", _one_version),
)
