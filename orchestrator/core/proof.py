"""What engines compute at a version: who stands for it, and who is contradicted by a peer.

An engine whose weights nothing shows is routed by the digest or the word of who handed them over; what it
computes is nobody's measure, or it would condemn those that are right. Pushed weights have no digest, so each
member is looked at aside. One that computes to the last bit what it computed before may have taken
nothing: it stands for nobody, and a peer that computes something else condemns it.
"""

from collections.abc import Iterator

from relight.events.canary import disagreement, is_same
from relight.events.facts import Healthy
from relight.events.ids import EngineName
from relight.events.schema import EngineState, Reference
from relight.events.values import Phase
from relight.events.version import BASE, Version
from relight.orchestrator.core import budget, recovery
from relight.orchestrator.core.enter import enter
from relight.orchestrator.core.job import Work

KEPT_REFERENCES = 4
"""Versions whose canary is kept: those that a late or returning engine may still hold."""


def lacks(engine: EngineState) -> bool:
    """Whether nothing shows that it holds the version that it is at."""
    return engine.unproven is not None and engine.unproven.version == engine.version


def mislabelled(work: Work, name: EngineName, fact: Healthy) -> None:
    """A look that was asked for has come, and tells another version than the engine's.

    A push moves the label before its trainer says that it is done, so that one above is no lie; one below is.
    """
    engine, sync = work.engines[name], work.meta.sync
    if not _is_pushed(engine) or engine.version is None:
        return
    if fact.version < engine.version:
        _condemn(work, name, engine.version, f"its label is {fact.version}")
        return
    work.put(name, intent=None)
    if sync is None or sync.order.version != fact.version:
        detail = f"{name}.{fact.incarnation} at {engine.version}: its label is {fact.version}"
        work.alarm("unproven", detail, reason="nobody has said that it was given that version")


def weigh(work: Work, name: EngineName, fact: Healthy) -> None:
    """Learn from the canary of a proof, or of a look, that was asked for and has come."""
    engine = work.engines[name]
    if fact.canary is None:
        return
    seen = Reference(version=fact.version, canary=fact.canary, moved=fact.moved and _moved(engine, fact))
    aside = _is_pushed(engine)
    if fact.unproven is None and not aside and not (engine.phase is Phase.SERVING and lacks(engine)):
        _stand(work, name, seen)
        return
    if error := _contradiction(work, name, seen):
        _condemn(work, name, fact.version, error)
        return
    if aside and not lacks(engine) and seen.moved:
        _stand(work, name, seen)
        return
    if aside and not lacks(engine):
        detail = f"{name}.{fact.incarnation} at {fact.version}: it computes exactly what it computed before"
        work.alarm("unproven", detail, reason="it is routed by the word of its trainer alone")
    work.put(name, unproven=seen)
    if seen.moved:
        _condemn_unmoved(work, seen)


def _is_pushed(engine: EngineState) -> bool:
    """Whether it serves weights of which no digest is known."""
    return engine.phase is Phase.SERVING and engine.digest is None and engine.version != BASE


def _moved(engine: EngineState, fact: Healthy) -> bool:
    """Of one that serves: whether it computes something else than at the version before."""
    last = engine.unproven or engine.reference
    if engine.phase is not Phase.SERVING or last is None or fact.canary is None:
        return True
    return (last.version == fact.version and last.moved) or not is_same(fact.canary, last.canary)


def _stand(work: Work, name: EngineName, seen: Reference) -> None:
    """It stands for its version."""
    work.put(name, reference=seen, unproven=None)
    if all(known.version != seen.version for known in work.meta.references):
        work.learn(references=(*work.meta.references[1 - KEPT_REFERENCES :], seen))
    for other, peer in _unproven(work, seen.version):
        error = disagreement(peer.canary, seen.canary, tolerance=work.settings.tolerance)
        if error:
            _condemn(work, other, seen.version, f"canary: {error}")


def _condemn_unmoved(work: Work, seen: Reference) -> None:
    for other, peer in _unproven(work, seen.version):
        error = disagreement(peer.canary, seen.canary, tolerance=work.settings.tolerance)
        if error and not peer.moved:
            _condemn(work, other, seen.version, f"it computes what it computed before: {error}")


def _contradiction(work: Work, name: EngineName, seen: Reference) -> str | None:
    """How a peer at its version computes something else, where that tells who is wrong."""
    tolerance = work.settings.tolerance
    for known in work.meta.references:
        if known.version == seen.version:
            error = disagreement(seen.canary, known.canary, tolerance=tolerance)
            return f"canary: {error}" if error else None
    for other, peer in _unproven(work, seen.version):
        if other != name and peer.moved and not seen.moved:
            error = disagreement(seen.canary, peer.canary, tolerance=tolerance)
            if error:
                return f"it computes what it computed before: {error}"
    return None


def _unproven(work: Work, version: Version) -> Iterator[tuple[EngineName, Reference]]:
    """Serving engines of which nothing shows that they hold `version`, and what they compute."""
    for name, engine in list(work.engines.items()):
        known = engine.unproven
        if engine.phase is Phase.SERVING and known is not None and known.version == engine.version == version:
            yield name, known


def _condemn(work: Work, name: EngineName, version: Version, error: str) -> None:
    """Its proof has failed: it is fenced and stopped."""
    detail = f"{name}.{work.engines[name].incarnation} is not at {version}: {error}"
    work.alarm("weights", detail, reason="it is restarted, whatever it holds now")
    work.put(name, intent=None, not_before=budget.retry_at(work))
    recovery.begin(work, name, why=f"its weights failed: {error}")
    enter(work, name, Phase.STOPPING, reason=f"Healthy: {error}")
