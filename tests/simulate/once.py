"""What the server may do once, and for nobody else: epochs, runs, leases, facts.

Asked of each script that was executed, against an account that nobody is believed in.
"""

from typing import TYPE_CHECKING, Any

from relight.events.bus import scripts
from relight.events.keys import Keys
from tests.simulate.server import position
from tests.simulate.words import Words

if TYPE_CHECKING:
    from tests.simulate.world import Job

TICK_S = 0.002
"""The server counts whole milliseconds."""


class Broken(Exception):
    """A rule does not hold."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Once:
    """One job's."""

    def __init__(self, job: "Job") -> None:
        self._job = job
        self._keys = Keys(job.name)
        self._epochs: set[int] = set()
        self._runs: set[int] = set()
        self._holder = ""
        """The epoch that the lease was given to last, and until when it lasts."""
        self._held_until_s = 0.0
        self._seen: dict[str, tuple[str, int]] = {}
        """Under which boot a source speaks, and the last number that was appended."""
        self.words = Words()

    def broken(self, rule: str, what: str) -> None:
        self._job.kernel.halt(Broken(rule, f"{self._job.name}: {what}"))

    def forgets(self) -> None:
        """The bus was emptied or rolled back."""
        self._seen.clear()
        self.words.forget()
        self._holder, self._held_until_s = "", 0.0

    def took(self, epoch: int) -> None:
        if epoch in self._epochs:
            self.broken("S10", f"epoch {epoch} is issued twice")
        self._epochs.add(epoch)

    def began(self, run: int) -> None:
        if run in self._runs:
            self.broken("S9", f"run {run} is issued twice")
        self._runs.add(run)

    def ran(self, script: str, args: list[str], reply: Any) -> None:
        """The server has executed a script of the job: what it took it takes once, and from nobody."""
        now_s = self._job.kernel.now
        if script == scripts.TAKE and reply[0] == "OK":
            if now_s < self._held_until_s - TICK_S:
                self.broken("S10", f"the lease is taken while epoch {self._holder} holds it")
            self._holder, self._held_until_s = reply[1], now_s + float(args[1]) / 1000.0
        elif script in (scripts.RENEW, scripts.RELEASE) and reply:
            epoch = args[0].partition(":")[0]
            if self._holder not in ("", epoch):
                self.broken("S10", f"epoch {epoch} keeps or gives up the lease of epoch {self._holder}")
            lasts_s = float(args[1]) / 1000.0 if script == scripts.RENEW else 0.0
            self._holder, self._held_until_s = epoch, now_s + lasts_s
        elif script == scripts.FORGET and reply > 0:
            for source in args[1::2]:
                self._seen.pop(source, None)
        elif script == scripts.APPEND and reply[0] == "OK":
            self._appended(args, int(reply[1]))
        elif script == scripts.TRIM and reply > 0:
            self._trimmed()

    def _trimmed(self) -> None:
        """Nothing is lost that no commit has taken yet."""
        data = self._job.world.server.data
        cursor = data.hashes.get(self._keys.state, {}).get("cursor", "0-0")
        facts = data.streams.get(self._keys.facts)
        if facts is not None and facts.gone > position(cursor):
            self.broken("S10", f"facts up to {facts.gone} are trimmed, and were read up to {cursor}")

    def _appended(self, args: list[str], added: int) -> None:
        """Each numbered fact stands in the stream once, whatever was retried or came late."""
        source, boot, at = args[0], args[1], 3
        speaks, last = self._seen.get(source, (boot, 0))
        if speaks != boot and args[2] != "1":
            self.broken("S8", f"{source} appends as {boot} after it has begun to speak as {speaks}")
        fresh, last = 0, last if speaks == boot else 0
        while at < len(args):
            end = at + 2 + int(args[at + 1])
            if int(args[at]) > last:
                fresh, last = fresh + 1, int(args[at])
                self.words.said(args[at + 2 : end])
            at = end
        if added > fresh:
            self.broken("S10", f"facts of {source} up to {last} are appended twice")
        self._seen[source] = boot, last
