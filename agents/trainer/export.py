"""Exports: one order, one answer, whatever the transport does."""

import logging

import msgspec

from relight.agents.trainer.barrier import Ended
from relight.agents.trainer.gate import Gate
from relight.agents.trainer.sync import Left, WeightSync, refusal, said
from relight.events.decisions import SyncWeights
from relight.events.facts import WeightsPublished
from relight.events.ids import DecisionId, SyncId
from relight.events.version import Version

log = logging.getLogger(__name__)


class Exporter:
    """Runs a transport in the thread that calls it."""

    def __init__(self, gate: Gate, sync: WeightSync) -> None:
        self._gate = gate
        self._sync = sync

    def run(self, order: SyncWeights) -> Exception | None:
        """Export what was taken from the gate and answer it; what the transport raised, if it did.

        KeyboardInterrupt and its like go through: the close of the boundary then says that it was cut off.
        """
        try:
            answer = self._sync.export(order, Left(order.members, self._gate.is_gone))
        except Exception as error:
            log.warning(
                "export failed", extra={"version": str(order.version), "sync": order.sync}, exc_info=error
            )
            self._gate.turn(Ended(refusal(order, said(error), touched=self._sync.pushes)))
            return error
        self._gate.turn(Ended(answer))
        return None

    def alone(self, version: Version) -> WeightsPublished | None:
        """Export without an order, to the members last committed; what is to be announced, if anything.

        Raises what the transport raises.
        """
        barrier = self._gate.barrier
        members = tuple(barrier.roster.values())
        order = SyncWeights(
            id=DecisionId("0-0"),
            epoch=0,
            reason="no orchestrator",
            sync=SyncId(f"alone-{version}"),
            run=barrier.run,
            boundary=barrier.boundary,
            version=version,
            members=members,
            deadline=0,
        )
        answer = self._sync.export(order, Left(members, self._gate.is_unlisted))
        return msgspec.structs.replace(answer, sync=None) if isinstance(answer, WeightsPublished) else None
