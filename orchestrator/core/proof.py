"""What engines compute at a version: who stands for it, and who is contradicted by a peer.

An engine whose weights nothing shows is routed by the digest or the word of who handed them over; what it
computes is nobody's measure, or it would condemn those that are right. Pushed weights have no digest, so each
member is looked at aside. Where two of them compute different things, the one that computes what it computed
before has taken nothing, or else most of them are right; where neither tells, nobody is stopped.
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
    if fact.version < engine.version and fact.labelled:
        _condemn(work, name, engine.version, f"its label is {fact.version}")
        return
    work.put(name, intent=None)
    if fact.version > engine.version and (sync is None or sync.order.version != fact.version):
        detail = f"{name}.{fact.incarnation} at {engine.version}: its label is {fact.version}"
        work.alarm("unproven", detail, reason="nobody has said that it was given that version")


def weigh(work: Work, name: EngineName, fact: Healthy) -> None:
    """Learn from the canary of a proof, or of a look, that was asked for and has come."""
    engine = work.engines[name]
    if fact.canary is None:
        return
    aside, lacking = _is_pushed(engine), engine.phase is Phase.SERVING and lacks(engine)
    seen = _seen(work, engine, fact)
    if fact.unproven is None and not aside and not lacking:
        work.put(name, reference=seen, unproven=None)
        _learn(work, seen)
        for other, peer in _looks(work, seen.version):
            if error := _error(work, peer, seen):
                _condemn(work, other, seen.version, f"canary: {error}")
        return
    measure = _measure(work, seen.version)
    if measure is not None and not measure.aside and (error := _error(work, seen, measure)):
        _condemn(work, name, seen.version, f"canary: {error}")
        return
    if aside and not lacking and seen.moved:
        work.put(name, reference=seen, unproven=None)
    else:
        work.put(name, unproven=seen)
        if aside and not lacking:
            detail = (
                f"{name}.{fact.incarnation} at {fact.version}: it computes exactly what it computed before"
            )
            work.alarm("unproven", detail, reason="it is routed by the word of its trainer alone")
    _compare(work, name, seen)


def _seen(work: Work, engine: EngineState, fact: Healthy) -> Reference:
    """The canary, beside what the engine computed at the version before."""
    assert fact.canary is not None
    moved, far = fact.moved, fact.moved if engine.phase is Phase.VERIFYING else None
    last = engine.unproven or engine.reference
    if engine.phase is Phase.SERVING and last is not None:
        if last.version == fact.version:
            moved, far = moved and last.moved, last.far
        else:
            moved = moved and not is_same(fact.canary, last.canary)
            far = disagreement(fact.canary, last.canary, tolerance=work.settings.tolerance) is not None
    return Reference(version=fact.version, canary=fact.canary, moved=moved, far=far, aside=_is_pushed(engine))


def _is_pushed(engine: EngineState) -> bool:
    """Whether it serves weights of which no digest is known."""
    return engine.phase is Phase.SERVING and engine.digest is None and engine.version != BASE


def _error(work: Work, one: Reference, other: Reference) -> str | None:
    return disagreement(one.canary, other.canary, tolerance=work.settings.tolerance)


def _measure(work: Work, version: Version) -> Reference | None:
    return next((known for known in work.meta.references if known.version == version), None)


def _learn(work: Work, seen: Reference) -> None:
    """It stands for its version, unless another one does that is as good."""
    known = _measure(work, seen.version)
    if known is not None and (seen.aside or not known.aside):
        return
    others = [each for each in work.meta.references if each.version != seen.version]
    work.learn(references=(*others[1 - KEPT_REFERENCES :], seen))


def _forget(work: Work, version: Version) -> None:
    """Nothing that was only looked at stands for it any more."""
    references = work.meta.references
    kept = tuple(known for known in references if known.version != version or not known.aside)
    if kept != references:
        work.learn(references=kept)


def _looks(work: Work, version: Version) -> Iterator[tuple[EngineName, Reference]]:
    """Serving engines of which nothing shows that they hold `version`, and what they compute."""
    for name, engine in list(work.engines.items()):
        if engine.phase is not Phase.SERVING or engine.version != version:
            continue
        known = engine.unproven or engine.reference
        if known is not None and known.version == version and (known is engine.unproven or known.aside):
            yield name, known


def _compare(work: Work, name: EngineName, seen: Reference) -> None:
    """One more was looked at: who is wrong is stopped, and what the others agree on is the measure."""
    looks = {**dict(_looks(work, seen.version)), name: seen}
    wrong = {one: why for one in looks if (why := _why_wrong(work, one, looks)) is not None}
    for one, why in wrong.items():
        _condemn(work, one, seen.version, why)
    rest = {one: look for one, look in looks.items() if one not in wrong}
    split = [
        (one, other)
        for one, look in rest.items()
        for other in rest
        if one < other and _error(work, look, rest[other])
    ]
    if split or wrong:
        _forget(work, seen.version)
    if split:
        one, other = split[0]
        detail = f"{one} and {other} compute different things at {seen.version}"
        work.alarm("unproven", detail, reason="nothing tells which of them is right, and both go on")
        return
    standing = (look for one, look in rest.items() if look is work.engines[one].reference)
    if (measure := next(standing, None)) is not None:
        _learn(work, measure)


def _why_wrong(work: Work, name: EngineName, looks: dict[EngineName, Reference]) -> str | None:
    """Whether others tell that this one does not hold its version."""
    mine = looks[name]
    against = {
        other: error for other, look in looks.items() if other != name and (error := _error(work, mine, look))
    }
    for other, error in against.items():
        if mine.far is False and looks[other].far:
            return f"it computes what it computed before, and {other} does not: {error}"
    if len(against) > len(looks) - len(against):
        return f"canary: it is alone against {', '.join(sorted(against))}: {next(iter(against.values()))}"
    return None


def _condemn(work: Work, name: EngineName, version: Version, error: str) -> None:
    """Its proof has failed: it is fenced and stopped."""
    detail = f"{name}.{work.engines[name].incarnation} is not at {version}: {error}"
    work.alarm("weights", detail, reason="it is restarted, whatever it holds now")
    work.put(name, intent=None, reference=None, unproven=None, not_before=budget.retry_at(work))
    recovery.begin(work, name, why=f"its weights failed: {error}")
    enter(work, name, Phase.STOPPING, reason=f"Healthy: {error}")
