"""RELIGHT_DISABLE=1: the session that is none. The application runs as if relight were not there."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self, TypeVar, overload

from relight.agents.trainer.barrier import Phase
from relight.agents.trainer.lanes import Lane
from relight.agents.trainer.members import Members
from relight.agents.trainer.sync import Left

T = TypeVar("T")


class _Nothing:
    """A scope without effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Disabled(_Nothing):
    """No bus, no run, no exports."""

    run = 0

    def __init__(self) -> None:
        self._lane = Lane()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lane.close()

    @overload
    def wait(
        self, fn: Callable[[], Awaitable[T]], *, step: int | None = None, phase: Phase = "rollout"
    ) -> T: ...
    @overload
    def wait(self, fn: Callable[[], T], *, step: int | None = None, phase: Phase = "rollout") -> T: ...
    def wait(
        self, fn: Callable[[], T | Awaitable[T]], *, step: int | None = None, phase: Phase = "rollout"
    ) -> T:
        return self._lane.call(fn)

    def boundary(self, step: int, *, phase: Phase = "rollout") -> _Nothing:
        return _Nothing()

    def sync(self, step: int) -> None: ...

    def syncing(self, step: int) -> AbstractContextManager[Members]:
        return nullcontext(Members((), Left((), lambda _: False)))

    def published(self, step: int, uri: str) -> None: ...

    def swapped(self) -> AbstractContextManager[None]:
        return nullcontext()
