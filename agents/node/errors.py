"""What operations on engines raise; a slot turns each into the fact that says so."""

from collections.abc import Generator
from contextlib import contextmanager

from relight.events.errors import RelightError


class StartFailure(RelightError):
    """The start came to nothing; what it left is still to be stopped."""

    def __init__(self, cause: str, detail: str, *, retryable: bool = True) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail
        self.retryable = retryable


class NotProven(RelightError):
    """Something of an incarnation may be left. The message names what and why."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


@contextmanager
def unproven() -> Generator[None]:
    """Where this machine has no descriptor or no disk left, a proof stays open and is asked for again."""
    try:
        yield
    except OSError as error:
        raise NotProven("resources", str(error)) from error
