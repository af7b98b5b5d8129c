"""What an application may call on a trainer's session; with relight disabled the same calls do nothing."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self, TypeVar, overload

from relight.agents.trainer.barrier import Phase
from relight.agents.trainer.members import Members

T = TypeVar("T")


class Scope(Protocol):
    """Something to be entered by `with` or by `async with`."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Trainer(Protocol):
    """One life of a trainer. Its run begins and ends with `with`."""

    def __enter__(self) -> Self:
        """Connect and take a run number. Raises BusUnavailable, UsageError."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say that the job is finished where nothing was raised; else only the pulse stops."""
        ...

    @property
    def run(self) -> int:
        """This life's number; 0 before it began, and with relight disabled."""
        ...

    @overload
    def wait(
        self, fn: Callable[[], Awaitable[T]], *, step: int | None = None, phase: Phase = "rollout"
    ) -> T: ...
    @overload
    def wait(self, fn: Callable[[], T], *, step: int | None = None, phase: Phase = "rollout") -> T: ...
    def wait(
        self, fn: Callable[[], T | Awaitable[T]], *, step: int | None = None, phase: Phase = "rollout"
    ) -> T:
        """Run `fn` with the boundary open; return or raise what it does.

        `fn` runs in another thread (a coroutine function in one lasting loop), with this thread's context
        variables; exports that a recovery asks for run here meanwhile. `step`: the live parameters' own,
        where it may have moved on since the last sync without relight seeing it.
        """
        ...

    def boundary(self, step: int, *, phase: Phase = "rollout") -> Scope:
        """A scope in which a second thread exports what a recovery asks for."""
        ...

    def sync(self, step: int) -> None:
        """Hand the live weights, which are those of `step` from now on, to every engine.

        Returns when the orchestrator lets the trainer go, or without it as `on_lost` says. Raises what the
        transport raises, OrchestratorLost, Superseded; UsageError for a step below the last one.
        """
        ...

    def syncing(self, step: int) -> AbstractContextManager[Members]:
        """Wrap a sync that the application does by itself: it begins with the members to reach.

        What `members.fail` was not told about counts as loaded; after an exception all count as touched.
        """
        ...

    def published(self, step: int, uri: str) -> None:
        """Announce that the weights of `step` stand at `uri`: a path or `file://` URI that all agents reach.

        A directory without a manifest gets one, for which every byte in it is hashed. So does one that an
        older run published, if it still holds the same. Raises SnapshotError.
        """
        ...

    def swapped(self) -> AbstractContextManager[None]:
        """Foreign weights are in the model: nothing is exported until the next `sync`.

        As a context manager: until its end, where the weights of its beginning are back. It begins before
        they go out; an exception that leaves it, or another `swapped` around it, leaves them swapped.
        """
        ...
