"""Checks of how the interrupted calls were finished: by what the client delivered and the engines logged."""

from collections.abc import Iterable

from relight.orchestrator.cli.demo.checks.case import Case, Check, Slot, Verdict, verdict
from relight.orchestrator.cli.demo.evidence import MODES, Mode, Piece


def _interrupted(case: Case) -> Verdict:
    wrong: list[str] = []
    got: list[str] = []
    for mode in MODES:
        first = [piece for piece in _pieces(case, mode) if piece.attempt == 0]
        tokens = _tokens(first)
        got.append(f"{mode} after {tokens}")
        if not 0 < tokens < case.plan.max_tokens or {_slot(piece) for piece in first} != {case.dead}:
            wrong.append(f"{mode} had {tokens} tokens of its first attempt, not all from {case.dead}")
    return verdict(wrong, f"both on {case.dead}: {' and '.join(got)} tokens")


def _kept_tokens(case: Case) -> Verdict:
    kept = [token for piece in _first(case, "continue") for token in piece.token_ids]
    same = case.turn("continue").token_ids[: len(kept)] == tuple(kept)
    return Verdict(same, f"the first {len(kept)} tokens {'stand' if same else 'were changed'}")


def _kept_logprobs(case: Case) -> Verdict:
    kept = [value for piece in _first(case, "continue") for value in piece.logprobs]
    same = case.turn("continue").logprobs[: len(kept)] == tuple(kept)
    return Verdict(
        same, f"the first {len(kept)} logprobs {'stand to the last bit' if same else 'were changed'}"
    )


def _once(case: Case) -> Verdict:
    """Every token came in exactly one piece of what the turn is made of."""
    whole = _tokens(_pieces(case, "continue"))
    last = _tokens(_last(case, "restart"))
    pairs = (("continue", whole), ("restart", last))
    wrong = [f"{mode} delivered {count}" for mode, count in pairs if count != case.plan.max_tokens]
    return verdict(wrong, f"{whole} tokens of the continued call and {last} of the replay, each once")


def _asked_for_the_rest(case: Case) -> Verdict:
    """By the budget that the engine noted in its own log for the last attempt."""
    kept = _tokens(_first(case, "continue"))
    attempts = case.turn("continue").attempts
    last = attempts[-1].request_id if attempts else "no attempt"
    noted = [note.max_tokens for note in case.evidence.notes if note.request_id.endswith(last)]
    right = noted == [case.plan.max_tokens - kept]
    return Verdict(right, f"the engine noted a budget of {noted}, the call had kept {kept}")


def _replayed_whole(case: Case) -> Verdict:
    attempts = case.turn("restart").attempts
    kept = attempts[-1].kept if attempts else -1
    return Verdict(kept == 0, f"the last of {len(attempts)} attempts began with {kept} tokens")


def _ended_on_a_living_engine(case: Case) -> Verdict:
    wrong: list[str] = []
    ends: list[str] = []
    alive = {Slot(look.engine, look.incarnation) for look in case.evidence.after}
    for mode in MODES:
        slots = {_slot(piece) for piece in _last(case, mode)}
        ends.append(f"{mode} on {', '.join(map(str, sorted(slots)))}")
        if not slots or not slots <= alive - {case.dead}:
            wrong.append(ends[-1])
    return verdict(wrong, "; ".join(ends))


def _pieces(case: Case, mode: Mode) -> list[Piece]:
    return [piece for piece in case.evidence.pieces if piece.mode == mode]


def _first(case: Case, mode: Mode) -> list[Piece]:
    return [piece for piece in _pieces(case, mode) if piece.attempt == 0]


def _last(case: Case, mode: Mode) -> list[Piece]:
    pieces = _pieces(case, mode)
    return [piece for piece in pieces if piece.attempt == pieces[-1].attempt]


def _tokens(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.token_ids) for piece in pieces)


def _slot(piece: Piece) -> Slot:
    return Slot(piece.engine, piece.incarnation)


CHECKS = (
    Check("both calls were interrupted in mid-stream", _interrupted),
    Check("the continued call kept its first tokens", _kept_tokens),
    Check("the continued call kept its first logprobs", _kept_logprobs),
    Check("the continued call asked only for the rest", _asked_for_the_rest),
    Check("the restarted call was replayed whole", _replayed_whole),
    Check("each token was delivered once", _once),
    Check("both calls ended on a living engine", _ended_on_a_living_engine),
)
