"""The engine as verl's server sees it: a death ends a generation as an abort with what there was of it.

verl's server turns a stream of outputs into one answer and knows how to say `aborted`; an exception it lets
through, and the sample would be lost. Outputs are vLLM's, cumulative: each has all tokens so far.
"""

import copy
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any, Protocol

from relight.agents.adapters.verl.ledger import Ledger

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What is asked of vLLM's AsyncLLM here."""

    def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]: ...


class Outliving:
    """`engine`, all of it, with `generate` as told above; what is made is written down in `ledger`."""

    def __init__(self, engine: Engine, ledger: Ledger, *, death: tuple[type[Exception], ...]) -> None:
        """`death`: what the engine raises once it is dead."""
        self._engine = engine
        self._ledger = ledger
        self._death = death
        self.cut_off: set[str] = set()
        """Requests whose answer is what there was at a death; taken out by whoever answers them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Outputs of one request, the last one with the finish reason `abort` where the engine died."""
        request: str = kwargs["request_id"]
        last: Any = None
        told = 0
        self._ledger.begin(request)
        try:
            async for output in self._engine.generate(*args, **kwargs):
                last = output
                told = self._note(request, output, told)
                yield output
        except self._death as error:
            log.warning("the engine died under a call request=%s tokens=%d error=%s", request, told, error)
            self.cut_off.add(request)
            yield _aborted(last)
        finally:
            self._ledger.end(request, last.outputs[0].finish_reason if last and last.outputs else None)

    def _note(self, request: str, output: Any, told: int) -> int:
        if not output.outputs:
            return told
        made = output.outputs[0]
        tokens = list(made.token_ids[told:])
        scores: list[float] | None = None
        if made.logprobs is not None:
            scored = list(made.logprobs)[told:]
            scores = [candidates[token].logprob for token, candidates in zip(tokens, scored, strict=True)]
        if tokens:
            self._ledger.add(request, tokens, scores)
        return told + len(tokens)


def _aborted(last: Any) -> Any:
    if last is None or not last.outputs:
        return SimpleNamespace(outputs=[])
    end = copy.copy(last)
    end.outputs = [copy.copy(last.outputs[0])]
    end.outputs[0].finish_reason = "abort"
    return end
