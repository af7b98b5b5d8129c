"""The orchestrators that are there, and which of them shall hold which job.

Rendezvous hashing: the job goes to the one whose hash with the job's name is the highest. Nobody has to be
asked or told; one that comes or goes moves its own share of the jobs and no other. It is a preference only,
and safe to be wrong: the lease decides.

Who is there is judged as pulses are: by numbers that advance, and the own monotonic clock.
"""

import hashlib
from collections.abc import Mapping

from relight.events.bus.roll import Presence
from relight.events.ids import JobName

BEAT_S = 0.5
"""How often an orchestrator shows that it is there."""

ALIVE_S = 1.4
"""One whose number stands still this long is taken for dead: two lost beats, and less than its leases still
last, so that nobody waits for it when they end."""

GONE_S = 10.0
"""One whose number stands still this long is removed; its next beat, if there is one, brings it back."""


class _Peer:
    def __init__(self, told: Presence, now_s: float) -> None:
        self.told = told
        self.advanced_at_s = now_s
        self.there_since_s = now_s


class Peers:
    """What is known of the others; `me` is always there."""

    def __init__(self, me: str) -> None:
        self.me = me
        self._peers: dict[str, _Peer] = {}
        self._ranked: dict[JobName, str] = {}
        self._ranked_among: frozenset[str] = frozenset()

    def look(self, told: Mapping[str, Presence], *, now_s: float) -> list[str]:
        """Note who has advanced; those that are to be removed."""
        for holder, presence in told.items():
            peer = self._peers.get(holder)
            if peer is None:
                self._peers[holder] = _Peer(presence, now_s)
            elif peer.told != presence:
                if not _is_alive(peer, now_s):
                    peer.there_since_s = now_s
                self._ranked = {} if peer.told.jobs != presence.jobs else self._ranked
                peer.told, peer.advanced_at_s = presence, now_s
        for holder in self._peers.keys() - told.keys():
            del self._peers[holder]
        return [
            holder
            for holder, peer in self._peers.items()
            if holder != self.me and now_s - peer.advanced_at_s > GONE_S
        ]

    def is_alive(self, holder: str, *, now_s: float) -> bool:
        peer = self._peers.get(holder)
        return holder == self.me or (peer is not None and _is_alive(peer, now_s))

    def there_s(self, holder: str, *, now_s: float) -> float:
        """For how long it has been there without a pause; 0 where it is not."""
        peer = self._peers.get(holder)
        return now_s - peer.there_since_s if peer is not None and _is_alive(peer, now_s) else 0.0

    def preferred(self, job: JobName, *, now_s: float) -> str:
        """Who of those that are there shall hold `job`."""
        alive = frozenset(holder for holder in self._peers if self.is_alive(holder, now_s=now_s))
        if alive != self._ranked_among:
            self._ranked, self._ranked_among = {}, alive
        found = self._ranked.get(job)
        if found is None:
            found = self._ranked[job] = max(
                (holder for holder in {*alive, self.me} if self._serves(holder, job)),
                key=lambda holder: weight(holder, job),
            )
        return found

    def _serves(self, holder: str, job: JobName) -> bool:
        peer = self._peers.get(holder)
        return holder == self.me or peer is None or peer.told.jobs is None or job in peer.told.jobs


def weight(holder: str, job: JobName) -> bytes:
    """The weight of `holder` for `job`: the same wherever it is computed."""
    return hashlib.blake2b(f"{holder} {job}".encode(), digest_size=8).digest()


def _is_alive(peer: _Peer, now_s: float) -> bool:
    return now_s - peer.advanced_at_s <= ALIVE_S
