"""The names of a job's keys. `{…}` is the cluster hash tag: a job lives in one slot."""

from dataclasses import dataclass

from relight.events.ids import JobName

JOBS = "relight:jobs"
"""Set of job names; in another slot than any job."""

ORCHESTRATORS = "relight:orchestrators"
"""Hash of the orchestrators that are there, each with its sign of life; in a slot of its own."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key of one job."""

    job: JobName

    def _key(self, what: str) -> str:
        return f"relight:{{{self.job}}}:{what}"

    @property
    def facts(self) -> str:
        return self._key("facts")

    @property
    def decisions(self) -> str:
        return self._key("decisions")

    @property
    def state(self) -> str:
        return self._key("state")

    @property
    def pulse(self) -> str:
        return self._key("pulse")

    @property
    def seen(self) -> str:
        return self._key("seen")

    @property
    def lease(self) -> str:
        return self._key("lease")

    @property
    def epoch(self) -> str:
        return self._key("epoch")

    @property
    def run(self) -> str:
        return self._key("run")

    @property
    def parked(self) -> str:
        return self._key("parked")
