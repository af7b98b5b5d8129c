"""The root of every error that relight raises on purpose. A subclass's name says whose fault it is."""

from typing import cast


class RelightError(Exception):
    """Anything relight raises on purpose. The message holds the values and what to do."""


class UsageError(RelightError):
    """A wrong argument, file or setting. Command lines exit with 2."""


class Undecodable(RelightError):
    """An entry of a stream that is of no known type or whose data is wrong. It is parked, never fatal."""


class BusUnavailable(RelightError):
    """The bus cannot be reached, or answers that it does not serve. Worth another try.

    `kind` is one word for why; as long as it stays the same there is nothing new to say.
    """

    def __init__(self, message: str, *, kind: str = "unreachable") -> None:
        super().__init__(message)
        self.kind = kind


class Fenced(RelightError):
    """Another life of this source has spoken on the bus. Whoever gets this stops."""


class LostLease(RelightError):
    """Another orchestrator holds the job. Whoever gets this ends its term at once."""


def leaves(error: BaseException) -> list[BaseException]:
    """The errors that a group of errors holds, however deep; of any other error, itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    held = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [leaf for inner in held for leaf in leaves(inner)]
