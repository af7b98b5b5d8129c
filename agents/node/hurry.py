"""A word to an agent that is ending: whoever ends it does not wait for its engines to end by themselves."""

from collections.abc import Callable


class Hurry:
    """Said once or more, before or after somebody listens."""

    def __init__(self) -> None:
        self._asked = False
        self._then: Callable[[], None] | None = None

    def set(self) -> None:
        """From here on engines that are being stopped are killed, and proven gone all the same."""
        self._asked = True
        if self._then is not None:
            self._then()

    def when_set(self, then: Callable[[], None]) -> None:
        """Call `then` at each `set`, and now where that was before."""
        self._then = then
        if self._asked:
            then()
