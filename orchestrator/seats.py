"""One job as one orchestrator sees it, held or not: when its lease is looked at, taken, and handed over.

Pure: times come in. Whom rendezvous hashing prefers takes a free lease at once; the others leave it to that
one for `DEFER_S`. A holder that is not preferred hands the job over, seldom and while nothing is under way.
"""

from relight.events.ids import EntryId, JobName
from relight.orchestrator.core.job import Job
from relight.orchestrator.peers import Peers
from relight.orchestrator.settings import Settings

LOOK_S = 0.2
"""How often the lease of somebody who is there is looked at: one that is given up sends no event."""

LOOK_SOON_S = 0.05
"""How often the lease of somebody who is not there any more, or a free one, is looked at."""

DEFER_S = 0.15
"""How long a free lease is left to the one who is preferred."""

HAND_OVER_S = 3.0
"""A job is handed over to one who has been there for this long: nobody moves jobs to a process that starts,
stalls and starts again."""

KEEP_S = 60.0
"""A job that was handed over and came back is not handed over again for this long."""

BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0, 60.0)
"""Waits after terms that failed by a bug; the last one repeats."""

WELL_S = 60.0
"""A term that lasted this long before it failed is a first failure again."""

PASS_OVER = 3
"""An entry that this many terms failed on is parked."""


class Seat:
    """What is remembered of one job between terms."""

    def __init__(self, job: JobName, settings: Settings) -> None:
        self.job = job
        self.settings = settings
        self.floor = 0
        """The next epoch lies above it."""
        self.look_at_s = 0.0
        self.passed_over: set[EntryId] = set()
        self.careful = False
        """Whether the next term takes entries one by one, to find the one that the last term failed on."""
        self._free_since_s: float | None = None
        self._kept_until_s = 0.0
        self._failures = 0
        self._failed_on: dict[EntryId, int] = {}

    # --- taking ------------------------------------------------------------------------------------

    def shown(self, holder: str | None, peers: Peers, *, now_s: float) -> bool:
        """A look showed who holds the lease; whether it is to be taken now."""
        if holder is not None:
            self._free_since_s = None
            there = peers.is_alive(holder, now_s=now_s)
            self.look_at_s = now_s + (LOOK_S if there else LOOK_SOON_S)
            return False
        self.look_at_s = now_s + LOOK_SOON_S
        if self._free_since_s is None:
            self._free_since_s = now_s
        mine = peers.preferred(self.job, now_s=now_s) == peers.me
        return mine or now_s - self._free_since_s >= DEFER_S

    def refused(self, *, now_s: float) -> None:
        """The server refuses this job's lease: another try will hardly do."""
        self.look_at_s = now_s + BACKOFF_S[0]

    # --- giving back -------------------------------------------------------------------------------

    def heir(self, peers: Peers, *, stands: Job | None, now_s: float) -> str | None:
        """Who shall have the job that we hold and that `stands` so, where it can be handed over now."""
        if stands is None or now_s < self._kept_until_s:
            return None
        heir = peers.preferred(self.job, now_s=now_s)
        if heir == peers.me or peers.there_s(heir, now_s=now_s) < HAND_OVER_S:
            return None
        return heir if is_settled(stands) else None

    def handed_over(self, *, now_s: float) -> None:
        """It is the heir's to take; if it comes back, nobody else could."""
        self._kept_until_s = now_s + KEEP_S
        self.look_at_s = now_s + LOOK_S + DEFER_S

    def lost(self, *, now_s: float) -> None:
        """The term ended by its lease or the bus, as terms do."""
        self._free_since_s = None
        self.look_at_s = max(self.look_at_s, now_s + LOOK_SOON_S)

    def failed(self, on: EntryId | None, *, lasted_s: float, now_s: float) -> float:
        """The term failed by a bug, on an entry or otherwise; how long it waits before the next."""
        self._failures = 1 if lasted_s >= WELL_S else self._failures + 1
        self.careful = True
        if on is not None:
            times = self._failed_on.get(on, 0) + 1
            self._failed_on = {on: times}
            if times >= PASS_OVER:
                self.passed_over = {on}
        wait_s = BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1]
        self.look_at_s = now_s + wait_s
        return wait_s


def is_settled(job: Job) -> bool:
    """Nothing is under way that a new epoch would have to ask for again."""
    if job.meta.sync is not None or any(record.asked for record in job.meta.nodes.values()):
        return False
    return all(
        engine.recovery is None and (engine.intent is None or engine.intent.dry_run)
        for engine in job.engines.values()
    )
