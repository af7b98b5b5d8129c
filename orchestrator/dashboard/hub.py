"""Which watches run: each from the first who looks until some seconds after the last."""

from collections.abc import Generator
from contextlib import contextmanager

import anyio
from anyio.abc import TaskGroup

from relight.events.bus.client import Bus
from relight.events.errors import UsageError
from relight.events.ids import JobName
from relight.orchestrator.dashboard.census import Census
from relight.orchestrator.dashboard.channel import Subscription
from relight.orchestrator.dashboard.tape import Place
from relight.orchestrator.dashboard.watches import JobWatch, Overview, Watch

LINGER_S = 10.0
"""How long a watch goes on when nobody looks: a browser that lost its connection comes back by then."""

READERS_MOST = 256
"""Live pages at a time: each may have as much waiting for it as its queue holds."""


class TooMany(UsageError):
    """As many look as this process serves."""


class Hub:
    """The watches of one process."""

    def __init__(self, bus: Bus, census: Census, tasks: TaskGroup) -> None:
        self._bus = bus
        self._census = census
        self._tasks = tasks
        self._watches: dict[JobName | None, Watch] = {}
        self.over = anyio.Event()
        """Set when the process ends."""

    @property
    def readers(self) -> int:
        return sum(len(watch.channel.readers) for watch in self._watches.values())

    @property
    def followed(self) -> int:
        """Jobs whose streams are followed."""
        return sum(job is not None for job in self._watches)

    @contextmanager
    def looking_at(self, job: JobName | None, place: Place | None) -> Generator[Subscription]:
        """Somebody looks at a job (None: at all of them) as long as the block lasts; raises TooMany."""
        if self.readers >= READERS_MOST:
            raise TooMany(
                f"{READERS_MOST} live pages are open already: close some, or start another dashboard"
            )
        watch = self._watches.get(job) or self._begin(job)
        reader = Subscription(place)
        watch.greet(reader)
        watch.channel.readers.add(reader)
        try:
            yield reader
        finally:
            watch.channel.readers.discard(reader)
            if not watch.channel.readers and not self.over.is_set():
                self._tasks.start_soon(self._end_later, watch)

    def end(self) -> None:
        """The process ends: so does every page's stream."""
        self.over.set()
        for watch in self._watches.values():
            watch.channel.end("the dashboard was stopped")

    def _begin(self, job: JobName | None) -> Watch:
        watch = Overview(self._census) if job is None else JobWatch(job, self._bus, self._census)
        self._watches[job] = watch
        self._tasks.start_soon(self._run, job, watch)
        return watch

    async def _run(self, job: JobName | None, watch: Watch) -> None:
        with watch.scope:
            await watch.run()
        if self._watches.get(job) is watch:
            del self._watches[job]

    async def _end_later(self, watch: Watch) -> None:
        await anyio.sleep(LINGER_S)
        if not watch.channel.readers:
            for job, known in list(self._watches.items()):
                if known is watch:
                    del self._watches[job]
            watch.scope.cancel()
