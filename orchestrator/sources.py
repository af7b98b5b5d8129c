"""Sources that will not speak again: what `seen` and `pulse` may forget of them, and what never.

`seen` is what keeps an old life of a source from speaking after a new one: forgetting a boot lets whoever
speaks next install its own. So an agent is forgotten only where that cannot matter: the state knows no engine
of its node (there is nothing an old life could say anything about, and its first word would be a report like
any new node's), and it has neither spoken nor pulsed for `GONE_S` while we looked. One that is merely cut off
has its engines in the state, and stays however long that takes. A trainer's run below the job's is forgotten
at once: the core refuses its words by their run, with or without a boot.
"""

from collections.abc import Mapping

from relight.events.bus.job import Pulse
from relight.events.ids import Source, agent_source
from relight.orchestrator.core.job import Job

GONE_S = 3600.0
"""Silence of an agent without engines after which it is forgotten: longer than a host takes to be repaired or
replaced, so that what is forgotten is a name that nobody bears any more."""

_AGENT, _TRAINER = "agent/", "trainer/"


class Sources:
    """When each source was last heard of in any way, by this process's monotonic clock."""

    def __init__(self) -> None:
        self._last: dict[Source, tuple[str, Pulse | None, float]] = {}

    def gone(
        self, job: Job, *, seen: Mapping[Source, str], pulses: Mapping[Source, Pulse], now_s: float
    ) -> dict[Source, str]:
        """The sources to forget, each with its value in `seen` (empty: none)."""
        told = {source: (seen.get(source, ""), pulses.get(source)) for source in {**seen, **pulses}}
        for source, (number, pulse) in told.items():
            last = self._last.get(source)
            if last is None or last[:2] != (number, pulse):
                self._last[source] = (number, pulse, now_s)
        self._last = {source: last for source, last in self._last.items() if source in told}
        manned = {agent_source(engine.node) for engine in job.engines.values()}
        manned |= {agent_source(left.node) for engine in job.engines.values() for left in engine.left}
        return {
            source: number
            for source, (number, _) in told.items()
            if _is_old_run(source, job)
            or (source.startswith(_AGENT) and source not in manned and self._still_s(source, now_s) > GONE_S)
        }

    def _still_s(self, source: Source, now_s: float) -> float:
        return now_s - self._last[source][2]


def _is_old_run(source: Source, job: Job) -> bool:
    run = source.removeprefix(_TRAINER)
    return run != source and run.isdecimal() and int(run) < job.meta.run
