"""verl's checkpoint worker, which receives weights and hands them to the engine beside it.

A broadcast reaches all receivers or none, so one whose engine dies in it must go on receiving: it drops what
comes, and says afterwards that its engine has not loaded. verl's worker waits on its engine's socket for ever
and inside the event loop; here its sockets have a limit.
"""

# verl's classes have no types: whatever `super()` gives is unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from pathlib import Path
from typing import Any

from relight.agents.adapters.verl import settings
from relight.agents.adapters.verl.theirs import theirs


def worker_class(base: Any) -> Any:
    """A subclass of verl's worker class `base`."""

    class Worker(base):  # type: ignore[misc]
        """A receiver that outlives its engine."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.relight_failed: str | None = None
            _limit_sockets(settings.of(self.rollout_config).stuck_s)

        async def update_weights(self, global_steps: int | None = None) -> None:
            weights = _Tap(self.checkpoint_engine.receive_weights(global_steps=global_steps))
            self.relight_failed = None
            try:
                await self.server_adapter.update_weights(
                    weights,
                    global_steps=global_steps,
                    wire_format=getattr(self.checkpoint_engine, "wire_format", "named_tensors"),
                )
            except Exception as error:  # noqa: BLE001 -- of engine, socket or Ray: told by relight_outcome
                self.relight_failed = f"{type(error).__name__}: {error}"
            await weights.rest()

        def relight_outcome(self) -> str | None:
            """Why the engine has not loaded the last weights; None where it has."""
            return self.relight_failed

        def relight_renew(self) -> None:
            """Hold nothing of an engine that is gone: handle, transfer state, socket file."""
            adapter = self.server_adapter
            adapter.server_handle = None
            adapter._delta_weight_transfer_engine_initialized = False
            if socket := getattr(adapter, "zmq_handle", ""):
                Path(socket.removeprefix("ipc://")).unlink(missing_ok=True)

    Worker.__name__ = Worker.__qualname__ = base.__name__
    return Worker


class _Tap:
    """What a transport yields, to be read to its end by one reader and, where that one fails, by `rest`."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._ended = False

    def __aiter__(self) -> "_Tap":
        return self

    async def __anext__(self) -> Any:
        try:
            if hasattr(self._source, "__anext__"):
                return await anext(self._source)
            return next(self._source)
        except (StopIteration, StopAsyncIteration):
            self._ended = True
            raise StopAsyncIteration from None

    async def rest(self) -> None:
        """Receive what is left, so that others do not wait for it. Raises what the transport raises."""
        while not self._ended:
            async for _ in self:
                pass


def _limit_sockets(seconds: float) -> None:
    """For the sockets that this process opens towards its engine from now on."""
    zmq = theirs("zmq")
    context: Any = zmq.Context.instance()
    context.setsockopt(zmq.RCVTIMEO, int(seconds * 1000))
    context.setsockopt(zmq.SNDTIMEO, int(seconds * 1000))
    context.setsockopt(zmq.LINGER, 0)
