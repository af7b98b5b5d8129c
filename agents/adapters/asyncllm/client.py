"""`ActorClient`: turns over the actors' own method instead of HTTP, with the same routes, ledger and replay.

Tokens come as Ray's stream brings them, so those that came before a death are kept, whatever died: the core
in the actor, the actor, or its node.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from relight.agents.adapters.asyncllm.losses import Loss, loss_of
from relight.agents.adapters.asyncllm.place import NAMESPACE, name_of
from relight.agents.replay.client import ReplayClient
from relight.agents.replay.generation import Generation
from relight.agents.replay.ledger import Ledger
from relight.agents.replay.limits import Call
from relight.agents.replay.speech import Errand
from relight.agents.replay.stream import Flight, Interrupted, Rejected
from relight.agents.replay.turn import End
from relight.agents.replay.wire import Chunk, RankedChunk, ScoredChunk

ENDS: Mapping[Loss, End] = {Loss.ENGINE: End.ERROR_FRAME, Loss.ACTOR: End.RESET, Loss.AWAY: End.RESET}
"""As HTTP would tell it: a server that says that its core is dead, and a connection that breaks."""


class ActorClient(ReplayClient):
    """A `ReplayClient` for processes of the actors' own Ray cluster; see there. Ray is initialised."""

    @contextmanager
    def _turn(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        call: Call,
        timeout_s: float | None,
    ) -> Generator[Generation]:
        dispatch, http = self._opened()
        ledger = Ledger(
            token_ids, sampling_params, policy=self._policy, tokenizer=self._tokenizer, eos=self._eos
        )
        limits = self._limits._replace(timeout_s=timeout_s)
        speech = _Speech(self._job, ranked=ledger.ranked)
        with self._counted(Generation(dispatch, http, ledger, call, limits, speech=speech)) as generation:
            yield generation


class _Speech:
    """How an actor is asked."""

    def __init__(self, job: str, *, ranked: bool) -> None:
        self._job = job
        self._ranked = ranked

    def flight(self, *, idle_s: float | None) -> Flight:
        return _Flight(ranked=self._ranked, idle_s=idle_s)

    async def send(self, flight: Flight, errand: Errand) -> None:
        assert isinstance(flight, _Flight)
        await flight.send(errand, name_of(self._job, *errand.key))

    def names(self, request_id: str) -> list[str]:
        return [request_id]


class _Flight(Flight):
    """One attempt over Ray's stream of an actor's method."""

    def __init__(self, *, ranked: bool, idle_s: float | None) -> None:
        super().__init__(ranked=ranked, idle_s=idle_s)
        self._kind: type[Chunk] = RankedChunk if ranked else ScoredChunk
        self._ray: Any = None
        self._stream: Any = None
        self._reading: anyio.CancelScope | None = None
        self._over = False

    def cut(self, end: End, detail: str) -> None:
        super().cut(end, detail)
        if self._reading is not None:
            self._reading.cancel()

    async def send(self, errand: Errand, name: str) -> None:
        """Wait as long as the errand says, find the actor and have it generate; raises Interrupted."""
        self._ray = import_module("ray")
        with self._opened():
            await anyio.sleep(errand.after_s)
            try:
                actor = await anyio.to_thread.run_sync(
                    lambda: self._ray.get_actor(name, namespace=NAMESPACE), abandon_on_cancel=True
                )
            except ValueError as error:  # what Ray raises for a name that no living actor has
                raise Interrupted(End.REFUSED, str(error)) from error
            generate = actor.generate.options(num_returns="streaming")
            self._stream = generate.remote(
                errand.ask.token_ids, errand.ask.sampling_params, errand.request_id
            )

    async def read(self) -> list[Chunk]:
        if self._cut is not None:
            raise self._cut
        self._waiting_since = self._loop.time()
        try:
            with anyio.CancelScope() as self._reading:
                told = await (await anext(self._stream))
                return [msgspec.convert(told, self._kind)]
        except StopAsyncIteration:
            self._over = True
            raise Interrupted(End.EOF, "the stream ended before a finish reason") from None
        except msgspec.ValidationError as error:
            raise Interrupted(End.MALFORMED, str(error)) from error
        except Exception as error:
            self._over = True
            raise _told(error) from error
        finally:
            self._reading = self._waiting_since = None
        assert self._cut is not None
        raise self._cut

    async def finish(self, within_s: float) -> None:
        """Nothing is kept open between two calls."""
        self._over = True

    def close(self) -> None:
        """Let go of it; one in the middle is cancelled, upon which vLLM aborts the request."""
        super().close()
        if self._stream is not None and not self._over:
            self._ray.cancel(self._stream)


def _told(error: Exception) -> Interrupted | Rejected:
    """The end of an attempt, from what Ray raised."""
    loss = loss_of(error)
    text = f"{type(error).__name__}: {error}".strip()
    first = text.partition("\n")[0][:300]
    if loss is None:
        return Rejected(400, text.encode())
    return Interrupted(ENDS[loss], f"{loss}: {first}")
