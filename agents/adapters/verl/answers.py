"""What a call is answered with whose engine died: verl's TokenOutput, aborted, with the tokens so far.

verl's fully-async client goes on behind such an answer with prompt and tokens. Where that would not be exact
(penalties, grammars, routing records of one pass) the answer has none, and the client begins there anew.
"""

from collections.abc import Mapping
from typing import Any

from relight.agents.adapters.verl.ledger import Kept
from relight.agents.adapters.verl.server import DIED
from relight.agents.adapters.verl.theirs import theirs
from relight.agents.replay.params import REPLAYED

MET_NONE = "relight_met_no_engine"
"""Key in an answer's extra fields: no engine has seen the call."""


def nothing() -> Any:
    """For a call that met no engine."""
    answer = cut_off(Kept(), steps=None)
    answer.extra_fields[MET_NONE] = True
    return answer


def lost(kept: Kept, *, steps: int | None, routed: bool) -> Any:
    """For a call whose answer died with its server: all of it where it had ended, else cut off.

    `routed`: routing records belong to the answer; nobody has them any more.
    """
    if kept.finish in (None, "abort") or routed:
        return cut_off(kept, steps=steps)
    return theirs("verl.workers.rollout.replica").TokenOutput(
        token_ids=kept.tokens,
        log_probs=kept.logprobs,
        stop_reason="completed" if kept.finish in ("stop", "length") else kept.finish,
        extra_fields={"global_steps": steps},
    )


def cut_off(kept: Kept, *, steps: int | None) -> Any:
    """For a call whose engine died behind these tokens, made by weights of `steps`."""
    return theirs("verl.workers.rollout.replica").TokenOutput(
        token_ids=kept.tokens,
        log_probs=kept.logprobs,
        stop_reason="aborted",
        extra_fields={"global_steps": steps, DIED: True},
    )


def died(answer: Any) -> bool:
    """Whether it ends where its engine died, or met none."""
    return bool(answer.extra_fields.get(DIED))


def met_none(answer: Any) -> bool:
    """Whether no engine has seen the call: it has died of nothing, and killed nothing."""
    return bool(answer.extra_fields.get(MET_NONE))


def continuable(answer: Any, params: Mapping[str, Any], *, routed: bool) -> Any:
    """`answer`, without its tokens where they cannot be continued; `routed`: with routing records."""
    inexact = routed or any(forbids(params) for forbids, _ in REPLAYED)
    if died(answer) and inexact:
        return cut_off(Kept(), steps=answer.extra_fields.get("global_steps"))
    return answer
