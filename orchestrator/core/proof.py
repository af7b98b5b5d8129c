"""What engines compute at a version, and which of them stands for it.

An engine whose weights nothing shows is routed by the digest of what was handed over; what it computes is
nobody's measure, or it would condemn those that are right.
"""

from relight.events.facts import Healthy
from relight.events.ids import EngineName
from relight.events.schema import EngineState, Reference
from relight.events.values import Phase
from relight.orchestrator.core.job import Work

KEPT_REFERENCES = 4
"""Versions whose canary is kept: those that a late or returning engine may still hold."""


def lacks(engine: EngineState) -> bool:
    """Whether nothing shows that it holds the version that it is at."""
    return engine.unproven is not None and engine.unproven.version == engine.version


def weigh(work: Work, name: EngineName, fact: Healthy) -> None:
    """Learn from the canary of a proof, or of a look, that was asked for and has come."""
    if fact.canary is None:
        return
    engine = work.engines[name]
    seen = Reference(version=fact.version, canary=fact.canary)
    if fact.unproven is not None or (engine.phase is Phase.SERVING and lacks(engine)):
        work.put(name, unproven=seen)
        return
    work.put(name, reference=seen, unproven=None)
    if all(known.version != seen.version for known in work.meta.references):
        work.learn(references=(*work.meta.references[1 - KEPT_REFERENCES :], seen))
