"""Exports: one order, one answer, whatever the transport does."""

import logging

import msgspec

from relight.agents.trainer.barrier import Ended, opening_of
from relight.agents.trainer.crew import Crew
from relight.agents.trainer.gate import Gate
from relight.agents.trainer.ranks import RanksLost
from relight.agents.trainer.sync import Left, WeightSync, refusal, told
from relight.agents.trainer.transports import Transports
from relight.events.decisions import SyncWeights
from relight.events.facts import WeightsPublished
from relight.events.ids import DecisionId, SyncId
from relight.events.version import Version

log = logging.getLogger(__name__)


class Exporter:
    """Runs the transports in the thread that calls it, on all ranks."""

    def __init__(self, gate: Gate, crew: Crew, transports: Transports) -> None:
        self._gate = gate
        self._crew = crew
        self._transports = transports

    def run(self, order: SyncWeights) -> Exception | None:
        """Export what was taken from the gate and answer it; what the transport raised, if it did.

        KeyboardInterrupt and its like go through: the close of the boundary then says that it was cut off.
        Raises RanksLost.
        """
        sync = self._transport()
        try:
            answer = self._crew.export(sync, order, Left(order.members, self._gate.is_gone))
        except Exception as error:
            log.warning(
                "export failed", extra={"version": str(order.version), "sync": order.sync}, exc_info=error
            )
            self._gate.turn(Ended(refusal(order, told(error), touched=sync.pushes)))
            if isinstance(error, RanksLost):
                raise
            return error
        self._gate.turn(Ended(answer))
        return None

    def alone(self, version: Version) -> WeightsPublished | None:
        """Export without an order, to the members last committed; what is to be announced, if anything.

        Raises what the transport raises.
        """
        members = tuple(self._gate.barrier.roster.values())
        order = msgspec.structs.replace(self._unordered(version), members=members)
        answer = self._crew.export(self._transport(), order, Left(members, self._gate.is_unlisted))
        return _announced(answer)

    def beside(self, version: Version) -> WeightsPublished | None:
        """After a push of `version`: the snapshot of it, where one is due; what is to be announced.

        A snapshot that cannot be written holds no training up: the next sync tries again.
        """
        snapshots = self._transports.snapshots
        if snapshots is None or not snapshots.is_due():
            return None
        try:
            order = self._unordered(version)
            return _announced(self._crew.export(snapshots, order, Left((), lambda _: False)))
        except RanksLost:
            raise
        except Exception as error:  # the weights are with the engines; what is lost is a way to recover
            log.error("no snapshot beside the push", extra={"version": str(version)}, exc_info=error)
            return None

    def _transport(self) -> WeightSync:
        """That of the open boundary."""
        ordinary, snapshots = self._transports.ordinary, self._transports.snapshots
        pulls = opening_of(self._gate.barrier).pulls
        chosen = snapshots if pulls else ordinary
        assert chosen is not None, "nothing is exportable without a transport"
        return chosen

    def _unordered(self, version: Version) -> SyncWeights:
        barrier = self._gate.barrier
        return SyncWeights(
            id=DecisionId("0-0"),
            epoch=0,
            reason="no orchestrator asked for it",
            sync=SyncId(f"alone-{version}"),
            run=barrier.run,
            boundary=barrier.boundary,
            version=version,
            members=(),
            deadline=0,
        )


def _announced(answer: object) -> WeightsPublished | None:
    return msgspec.structs.replace(answer, sync=None) if isinstance(answer, WeightsPublished) else None
