"""What keeps the bus from serving, said once a change and not once a try.

A process makes many calls a second, and each of them fails while the bus is away. What is wrong with the
connection ends with the first call that is served; what the server refuses (writes while its memory is
full, a key it will not touch) ends when each of the calls that were refused is served.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from relight.events.bus.clock import monotonic_ms
from relight.events.errors import BusUnavailable

log = logging.getLogger(__name__)

SAID_MS = 10_000.0
"""The same trouble is not said again within this: a bus that comes and goes must not flood the log."""

_OF_CONNECTION = frozenset({"unreachable", "credentials", "loading"})


class _Trouble(msgspec.Struct):
    calls: set[str]
    """Those that were not served."""
    said: bool = False


class Outages:
    """The troubles of one bus as one process meets them."""

    def __init__(self) -> None:
        self._open: dict[str, _Trouble] = {}
        self._said_ms: dict[str, float] = {}
        self._silent = False
        self._told = False
        """Whether anything was said since the bus last served."""

    @contextmanager
    def left_to_the_caller(self) -> Generator[None]:
        """Say nothing of what fails in the block: whoever gets the error says it."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def failed(self, call: str, error: BusUnavailable) -> None:
        """`call` was not served."""
        if self._silent:
            return
        name = error.kind if error.kind in _OF_CONNECTION else str(error)
        trouble = self._open.setdefault(name, _Trouble(set()))
        trouble.calls.add(call)
        now = monotonic_ms()
        if trouble.said or now - self._said_ms.get(name, -SAID_MS) < SAID_MS:
            return
        self._said_ms = {known: at for known, at in self._said_ms.items() if now - at < SAID_MS}
        self._said_ms[name] = now
        trouble.said = self._told = True
        log.warning("the bus does not serve: %s", error)

    def served(self, call: str) -> None:
        """`call` was served."""
        if not self._open:
            return
        for name, trouble in list(self._open.items()):
            trouble.calls.discard(call)
            if not trouble.calls or name in _OF_CONNECTION:
                del self._open[name]
        if self._told and not self._open:
            self._told = False
            log.info("the bus serves again")
