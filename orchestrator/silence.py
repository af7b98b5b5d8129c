"""Silence: which sources' signs of life have stood still, by this process's own monotonic clock.

What counts is that a number advances, never what a clock elsewhere says. Everybody gets one fresh grace
period when a term has read its backlog, after a stall of our own and after the bus was away: nobody knows
what was said meanwhile.
"""

from collections.abc import Iterable, Mapping

from relight.events.bus.job import Pulse
from relight.events.facts import AnyFact, NodeSilent, TrainerSilent
from relight.events.ids import Source, agent_source, trainer_source
from relight.orchestrator.core.job import Job


class Silence:
    """When each source's pulse was last seen to advance."""

    def __init__(self) -> None:
        self._seen: dict[Source, tuple[Pulse | None, float]] = {}

    def forgive(self) -> None:
        """Everybody gets a fresh grace period, from the next look on."""
        self._seen = {}

    def look(self, pulses: Mapping[Source, Pulse], expected: Iterable[Source], *, now_s: float) -> None:
        """Note which of the `expected` sources have advanced; `now_s` is monotonic."""
        expected = set(expected)
        for source in expected:
            pulse = pulses.get(source)
            last = self._seen.get(source)
            if last is None or (pulse is not None and pulse != last[0]):
                self._seen[source] = (pulse, now_s)
        for source in self._seen.keys() - expected:
            del self._seen[source]

    def silent_s(self, source: Source, *, now_s: float) -> float:
        """For how long the source's pulse has stood still."""
        _, at = self._seen.get(source, (None, now_s))
        return now_s - at

    def judge(self, job: Job, pulses: Mapping[Source, Pulse], *, now_s: float, now: int) -> list[AnyFact]:
        """Who of the job has been silent for too long; `now` is the same moment in bus time (ms)."""
        meta, settings = job.meta, job.settings
        nodes = {agent_source(node): node for node, record in meta.nodes.items() if not record.silent}
        trainer = trainer_source(meta.run)
        watched = meta.run > 0 and not meta.finished and not meta.trainer_silent
        self.look(pulses, [*nodes, *([trainer] if watched else [])], now_s=now_s)
        silent: list[AnyFact] = []
        for source, node in nodes.items():
            still_s = self.silent_s(source, now_s=now_s)
            if still_s > settings.node_silence_s:
                silent.append(NodeSilent(node=node, since=now - int(still_s * 1000)))
        still_s = self.silent_s(trainer, now_s=now_s)
        if watched and still_s > settings.trainer_silence_s:
            silent.append(TrainerSilent(run=meta.run, since=now - int(still_s * 1000)))
        return silent
