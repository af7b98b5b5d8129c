"""The ranks of one trainer, as far as relight needs them to hear each other.

Rank 0 speaks with the bus and tells the others what is done; they never act on anything else. What is said
here never goes over the application's own groups.
"""

from typing import Protocol

from relight.events.errors import RelightError


class RanksLost(RelightError):
    """A rank of this trainer has ended, or was not heard within the deadline."""


class RankFailed(RelightError):
    """A call ended here because of what another rank raised in it."""


class Ranks(Protocol):
    """A group of this trainer's ranks. Every call is made by all of them, in the same order.

    Each raises RanksLost where a rank is gone or late, and from then on always.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def tell(self, data: bytes) -> bytes:
        """What rank 0 gives, on every rank; what the others give is not looked at."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank gives, by rank, on every rank."""
        ...

    def close(self) -> None:
        """Leave. Whoever waits for this rank hears of it at once."""
        ...


class Solo:
    """The only rank there is."""

    rank = 0
    size = 1

    def tell(self, data: bytes) -> bytes:
        return data

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def close(self) -> None: ...
