"""StartEngine and StopEngine as an engine's record allows them, and the facts that answer them.

A fact is published before the record forgets the step: an agent that dies in between says it twice, which
harms nobody, and never not at all.
"""

import logging

import anyio
import msgspec

from relight.agents.node import evidence, foundlings, launcher, part, stall, start, stop
from relight.agents.node.config import device
from relight.agents.node.errors import NotProven, StartFailure, unproven
from relight.agents.node.owned import Owned
from relight.events.decisions import StartEngine, StopEngine
from relight.events.facts import EngineDead, EngineStopped, StartFailed, StopFailed
from relight.events.values import Cause, Process, Proof

log = logging.getLogger(__name__)

LEAST_S = 5.0
"""For a stop whose deadline has passed: it is tried all the same."""
MAY_BE_ITS_DEVICE = ("canary", "deadline", "device-busy", "exit", "stalled")
"""Causes of a failed start that a broken device brings about; a taken port or absent weights is none."""
HANGS = ("deadline", "stalled")
"""Causes of a failed start whose processes may live and stand still."""
PROOF_S = 30.0
"""For a proof that no decision bounds: after a failed start, at an adoption, at the agent's end."""


async def begin(owned: Owned, order: StartEngine) -> None:
    """Fill the slot as `order` says; publishes EngineStarted or StartFailed."""
    record = owned.record
    if order.incarnation <= record.incarnation:
        _begun_before(owned, order)
        return
    try:
        with unproven():
            begun = await _clear(owned, order.incarnation)
    except NotProven as error:
        text = f"incarnation {record.incarnation} is not gone: {error}"
        owned.shared.say(_start_failed(owned, order, StartFailure("predecessor", text), Proof()))
        return
    if begun is not None:
        owned.note(incarnation=order.incarnation)
        lost = StartFailure("interrupted", "it was being started, and the record of that was lost")
        _ended(owned, _start_failed(owned, order, lost, begun))
        return
    try:
        await start.start(owned, order)
    except StartFailure as error:
        await failed(owned, error, order)


def _begun_before(owned: Owned, order: StartEngine) -> None:
    record = owned.record
    if order.incarnation < record.incarnation:
        return
    if owned.up:
        owned.shared.say(start.started(owned, order))
    elif record.phase == "absent" and isinstance(record.ended, StartFailed):
        owned.shared.say(msgspec.structs.replace(record.ended, answers=order.id))


async def _clear(owned: Owned, incarnation: int) -> Proof | None:
    """Prove everything of older incarnations gone, and what stands of this one, whose proof is returned.

    Raises NotProven.
    """
    if owned.record.phase != "absent":
        await evidence.gathered(owned)
        await stop.prove_present_gone(owned, grace_s=0, within_s=PROOF_S)
        owned.save(phase="absent")
    await launcher.of(owned).withdraw(owned, within_s=PROOF_S)
    begun: Proof | None = None
    for found in sorted(owned.family()):
        if found <= incarnation:
            proof = await foundlings.prove_gone(owned, found, (), within_s=PROOF_S)
            begun = proof if found == incarnation else None
    owned.foundlings.clear()
    return begun


async def failed(owned: Owned, error: StartFailure, order: StartEngine) -> None:
    """Clear what a start left, then say so."""
    log.warning(
        "start failed engine=%s.%d log=%s error=%s", owned.name, order.incarnation, owned.log_path, error
    )
    if error.cause in HANGS:
        evidence.begin(owned)
    await evidence.gathered(owned)
    try:
        with unproven():
            proof = await stop.prove_present_gone(owned, grace_s=0, within_s=PROOF_S)
    except NotProven as left:
        detail = f"{error.detail}; and what its start left is not gone: {left.detail}"
        owned.shared.say(
            EngineDead(
                engine=owned.name,
                incarnation=order.incarnation,
                node=owned.shared.node,
                cause=Cause.START,
                detail=detail,
                device=device(owned.config),
            )
        )
        owned.save(phase="up", dead=True)
        return
    fact = _start_failed(owned, order, error, proof)
    if error.cause in MAY_BE_ITS_DEVICE:
        fact = msgspec.structs.replace(fact, device=device(owned.config))
    _ended(owned, fact)


def _start_failed(owned: Owned, order: StartEngine, error: StartFailure, proof: Proof) -> StartFailed:
    return StartFailed(
        engine=order.engine,
        incarnation=order.incarnation,
        node=owned.shared.node,
        cause=error.cause,
        retryable=error.retryable,
        detail=error.detail,
        proof=proof,
        answers=order.id,
    )


async def end(owned: Owned, order: StopEngine) -> None:
    """Stop what `order` names and prove it gone; publishes EngineStopped or StopFailed."""
    record = owned.record
    if order.incarnation != record.incarnation:
        await _end_another(owned, order)
    elif record.phase == "absent":
        proof = record.ended.proof if record.ended else Proof()
        owned.shared.say(_stopped(owned, order, proof))
        if record.then != order.then:
            owned.save(then=order.then)
    else:
        owned.note(stop=order)
        await end_present(owned)


async def end_present(owned: Owned) -> None:
    """Stop the recorded incarnation; the order is in the record, where there is one."""
    well, order = owned.up, owned.record.stop
    owned.note(phase="stopping")
    within_s = owned.seconds_until(order.deadline, at_least=LEAST_S) if order else PROOF_S
    drains = well and not owned.record.paused and not owned.hurried
    if order is not None and order.drain_s > 0 and drains:
        with anyio.move_on_after(order.drain_s) as owned.drain:
            await (part.ended if owned.config.part else stall.drained)(owned)
    await evidence.gathered(owned)
    grace_s = min(owned.config.grace_s, within_s / 2) if well and not owned.hurried else 0.0
    try:
        with unproven():
            proof = await stop.prove_present_gone(owned, grace_s=grace_s, within_s=within_s)
    except NotProven as error:
        _not_stopped(owned, error, owned.record.stop)
        return
    order = owned.record.stop  # the newest one: it may have been repeated meanwhile
    _ended(owned, _stopped(owned, order, proof), then=order.then if order else "restart")


async def _end_another(owned: Owned, order: StopEngine) -> None:
    """An incarnation that this record does not speak of: of a lost disk, or left behind long ago."""
    try:
        await launcher.of(owned).withdraw(
            owned, within_s=owned.seconds_until(order.deadline, at_least=LEAST_S)
        )
        proof = await foundlings.prove_gone(
            owned,
            order.incarnation,
            _processes_here(owned, order),
            within_s=owned.seconds_until(order.deadline, at_least=LEAST_S),
        )
    except NotProven as error:
        _not_stopped(owned, error, order)
        return
    fact = _stopped(owned, order, proof)
    owned.foundlings.pop(order.incarnation, None)
    if order.incarnation > owned.record.incarnation and owned.record.phase == "absent":
        owned.note(incarnation=order.incarnation, stop=order)
        _ended(owned, fact, then=order.then)
    else:
        owned.shared.say(fact)


def _processes_here(owned: Owned, order: StopEngine) -> tuple[Process, ...]:
    """What the orchestrator knows of it on this node."""
    here = (place for place in order.others if place.node == owned.shared.node)
    return next((place.processes for place in here), order.processes)


def _stopped(owned: Owned, order: StopEngine | None, proof: Proof) -> EngineStopped:
    return EngineStopped(
        engine=owned.name,
        incarnation=order.incarnation if order else owned.record.incarnation,
        node=owned.shared.node,
        proof=proof,
        answers=order.id if order else None,
    )


def _not_stopped(owned: Owned, error: NotProven, order: StopEngine | None) -> None:
    incarnation = order.incarnation if order else owned.record.incarnation
    log.error("not proven gone engine=%s.%d error=%s", owned.name, incarnation, error)
    owned.shared.say(
        StopFailed(
            engine=owned.name,
            incarnation=incarnation,
            node=owned.shared.node,
            cause=error.cause,
            detail=error.detail,
            answers=order.id if order else None,
        )
    )


def _ended(owned: Owned, fact: EngineStopped | StartFailed, *, then: str = "restart") -> None:
    owned.shared.say(fact)
    owned.save(phase="absent", dead=False, ended=fact, then=then, load=None)
    launcher.of(owned).ended(owned, fact.incarnation, fact.detail if isinstance(fact, StartFailed) else "")
    log.info("gone engine=%s.%d proof_ms=%.1f", owned.name, fact.incarnation, fact.proof.took_ms)
