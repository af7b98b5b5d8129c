"""One export by several ranks, shard by shard: nobody gathers a tensor before rank 0 has said so.

Rank 0 may fail between two shards (a full disk); the others then hear `stop` and not a hanging collective.
"""

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import msgspec

from relight.agents.trainer import shards, words
from relight.agents.trainer.ranks import RankFailed, Ranks
from relight.agents.trainer.sync import told
from relight.agents.trainer.tensors import Named
from relight.events.errors import UsageError

_GO, _STOP = b"go", b"stop"


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank would gather."""

    spread: str = ""
    """Digest of the names and forms of tensors that are spread over the ranks; empty where it holds none."""
    error: str | None = None


@contextmanager
def leading(
    ranks: Ranks, tensors: Callable[[], list[Named]]
) -> Generator[tuple[list[Named], Callable[[], None]]]:
    """Rank 0's tensors, and what it calls before each shard. Raises what `tensors` raises, RankFailed."""
    if ranks.size == 1:
        yield tensors(), lambda: None
        return
    mine = _agreed(ranks, tensors)
    try:
        yield mine, lambda: _said(ranks, _GO)
    finally:
        _said(ranks, _STOP)


def follow(ranks: Ranks, tensors: Callable[[], list[Named]], *, max_shard_bytes: int) -> None:
    """What another rank does meanwhile. Raises what `tensors` raises, RankFailed."""
    plan = shards.plan(_agreed(ranks, tensors), max_shard_bytes)
    for number in range(len(plan) + 1):
        if ranks.tell(b"") == _STOP:
            return
        for tensor in plan[number] if number < len(plan) else ():
            if tensor.joins is not None:
                tensor.joins()
    while ranks.tell(b"") != _STOP:  # shards of tensors that rank 0 alone holds
        pass


def _agreed(ranks: Ranks, tensors: Callable[[], list[Named]]) -> list[Named]:
    mine: list[Named] = []
    failure: Exception | None = None
    try:
        mine = tensors()
    except Exception as error:  # noqa: BLE001 -- raised below, once the others know of it
        failure = error
    plan = _Plan(spread=_spread(mine), error=told(failure))
    plans = [words.read(data, _Plan) for data in ranks.gather(words.written(plan))]
    if failure is not None:
        raise failure
    failed = {rank: one.error for rank, one in enumerate(plans) if one.error is not None}
    if failed:
        raise RankFailed("; ".join(f"rank {rank}: {error}" for rank, error in failed.items()))
    if len({one.spread for one in plans}) > 1:
        raise UsageError("the ranks of this trainer do not hold parts of the same tensors")
    return mine


def _spread(tensors: Sequence[Named]) -> str:
    forms = [f"{one.name} {one.form}" for one in tensors if one.joins is not None]
    return hashlib.sha256("\n".join(forms).encode()).hexdigest() if forms else ""


def _said(ranks: Ranks, word: bytes) -> None:
    ranks.tell(word)
