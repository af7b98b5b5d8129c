"""Each check of the demo's audit is proven: its fault is put into good evidence, and it alone fails."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
import pytest

from relight.events.decisions import (
    Alarm,
    LoadWeights,
    RecoveryFinished,
    RouteAdded,
    RouteFenced,
    StartEngine,
    SyncWeights,
    VerifyEngine,
)
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    JobFinished,
    RouteSuspected,
    SafeBoundary,
    WeightsLoaded,
    WeightsPublished,
)
from relight.events.ids import DecisionId, EngineName, EntryId
from relight.events.values import Cause, Member
from relight.events.version import BASE
from relight.orchestrator.cli.demo.audit import CHECKS, audit
from relight.orchestrator.cli.demo.checks.case import GENERATE, Case
from relight.orchestrator.cli.demo.evidence import Evidence, Request
from tests.demo_evidence import (
    RECORDED,
    decided_too,
    edited,
    found,
    load,
    look,
    piece,
    put,
    replace,
    request,
    swapped,
    told_too,
    turn,
    without,
)

recorded = cache(load)
Wrong = Callable[[Evidence], Evidence]


class Fault(NamedTuple):
    """What is put into good evidence, and into which recording."""

    wrong: Wrong
    recording: str = "two-engines"


def _dead(evidence: Evidence) -> dict[str, Any]:
    return dict(Case(evidence).dead._asdict())


def _new(evidence: Evidence) -> dict[str, Any]:
    return dict(Case(evidence).replacement._asdict())


def _survivor(evidence: Evidence) -> str:
    return Case(evidence).survivors[0]


def _version(evidence: Evidence) -> Any:
    return Case(evidence).version


# --- samples and replay ------------------------------------------------------------------------------------


def _twice(evidence: Evidence) -> Evidence:
    return replace(evidence, turns=(*evidence.turns, Case(evidence).turn("restart")))


def _shorter(evidence: Evidence) -> Evidence:
    whole = Case(evidence).turn("continue")
    spans = ((str(_version(evidence)), 0, 63),)
    return turn(
        evidence, "continue", token_ids=whole.token_ids[:63], logprobs=whole.logprobs[:63], versions=spans
    )


def _logprob(value: float, evidence: Evidence) -> Evidence:
    return turn(evidence, "restart", logprobs=put(Case(evidence).turn("restart").logprobs, 40, value))


def _token(evidence: Evidence) -> Evidence:
    return turn(evidence, "restart", token_ids=put(Case(evidence).turn("restart").token_ids, 40, 511))


def _spans(of: Callable[[str], tuple[tuple[str, int, int], ...]], evidence: Evidence) -> Evidence:
    return turn(evidence, "continue", versions=of(str(_version(evidence))))


def _piece(mode: str, attempt: int, **changes: Any) -> Wrong:
    """The first piece of one attempt, changed."""

    def wrong(evidence: Evidence) -> Evidence:
        at = next(
            at
            for at, each in enumerate(evidence.pieces)
            if (each.mode, min(each.attempt, 1)) == (mode, attempt) and each.token_ids
        )
        return piece(evidence, at, **changes)

    return wrong


def _delivered_again(evidence: Evidence) -> Evidence:
    last = [each for each in evidence.pieces if each.mode == "continue"][-1]
    return replace(evidence, pieces=(*evidence.pieces, last))


def _asked_again_for_all(evidence: Evidence) -> Evidence:
    last = Case(evidence).turn("continue").attempts[-1].request_id
    notes = [
        replace(each, max_tokens=64) if each.request_id.endswith(last) else each for each in evidence.notes
    ]
    return replace(evidence, notes=tuple(notes))


def _went_on(evidence: Evidence) -> Evidence:
    attempts = Case(evidence).turn("restart").attempts
    return turn(evidence, "restart", attempts=put(attempts, len(attempts) - 1, replace(attempts[-1], kept=7)))


def _ended_nowhere(evidence: Evidence) -> Evidence:
    pieces = tuple(
        replace(each, incarnation=7) if each.mode == "restart" and each.attempt > 0 else each
        for each in evidence.pieces
    )
    return replace(evidence, pieces=pieces)


# --- trainer and weights -----------------------------------------------------------------------------------


def _trainer(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, trainer=replace(evidence.trainer, **changes))


def _boundary(evidence: Evidence) -> Evidence:
    opened = found(evidence, SafeBoundary, state="open", sync="stale")
    return edited(
        evidence, SafeBoundary, {"state": "open", "sync": "stale"}, at=len(opened) - 1, exports=None
    )


def _snapshot(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, snapshot=replace(evidence.snapshot, **changes))


def _published_otherwise(evidence: Evidence) -> Evidence:
    told = {"version": _version(evidence)}
    last = len(found(evidence, WeightsPublished, **told)) - 1
    return edited(evidence, WeightsPublished, told, at=last, digest="sha256:0")


def _other_tensor(evidence: Evidence) -> Evidence:
    name, tensor = next(iter(evidence.snapshot.tensors.items()))
    return _snapshot(evidence, tensors={**evidence.snapshot.tensors, name: replace(tensor, sha256="0")})


def _after(**changes: Any) -> Wrong:
    return lambda evidence: look(evidence, "after", _new(evidence)["engine"], **changes)


def _answers_otherwise(field: str, value: Any) -> Wrong:
    def wrong(evidence: Evidence) -> Evidence:
        now = Case(evidence).look(evidence.after, Case(evidence).replacement)
        assert now is not None
        said = now.generations["continue"]
        changed = replace(said, **{field: put(getattr(said, field), 3, value)})
        return _after(generations={**now.generations, "continue": changed})(evidence)

    return wrong


def _canary(evidence: Evidence) -> Evidence:
    told = {**_new(evidence), "version": _version(evidence)}
    canary = found(evidence, Healthy, **told)[0][1].canary
    shifted = replace(canary, logprobs=put(canary.logprobs, 2, canary.logprobs[2] - 0.01))
    return edited(evidence, Healthy, told, canary=shifted)


def _same_policy(evidence: Evidence) -> Evidence:
    canary = found(evidence, Healthy, **_new(evidence))[0][1].canary
    for at in range(len(found(evidence, Healthy, version=BASE))):
        evidence = edited(evidence, Healthy, {"version": BASE}, at=at, canary=canary)
    return evidence


# --- order and bus -----------------------------------------------------------------------------------------


def _routed_before_proof(evidence: Evidence) -> Evidence:
    (verify, _), (route, _) = (
        found(evidence, kind, **_new(evidence))[0] for kind in (VerifyEngine, RouteAdded)
    )
    return swapped(evidence, verify, route)


def _started_before_gone(evidence: Evidence) -> Evidence:
    stopped = found(evidence, EngineStopped, **_dead(evidence))[0][0]
    return swapped(evidence, stopped, found(evidence, EngineStarted, **_new(evidence))[0][0])


def _of_new(kind: type[Any], **changes: Any) -> Wrong:
    return lambda evidence: edited(evidence, kind, _new(evidence), **changes)


def _of_dead(kind: type[Any], **changes: Any) -> Wrong:
    """The newest message of a type about the dead incarnation, changed."""

    def wrong(evidence: Evidence) -> Evidence:
        last = len(found(evidence, kind, **_dead(evidence))) - 1
        return edited(evidence, kind, _dead(evidence), at=last, **changes)

    return wrong


def _decided_again(kind: type[Any], of: Callable[[Evidence], dict[str, Any]]) -> Wrong:
    return lambda evidence: decided_too(evidence, found(evidence, kind, **of(evidence))[-1][1])


def _synced_with_the_survivor(evidence: Evidence) -> Evidence:
    last = len(found(evidence, SyncWeights)) - 1
    order = found(evidence, SyncWeights)[last][1]
    other = Member(EngineName(_survivor(evidence)), 1, "http://127.0.0.1:1")
    return edited(evidence, SyncWeights, {}, at=last, members=(*order.members, other))


def _asked_the_trainer(evidence: Evidence) -> Evidence:
    return decided_too(evidence, found(evidence, SyncWeights)[-1][1])


def _unknown(evidence: Evidence) -> Evidence:
    said = found(evidence, RouteSuspected)[0][0]
    facts = tuple(replace(each, type="Rumour") if each is said else each for each in evidence.facts)
    return replace(evidence, facts=facts)


def _unchained(evidence: Evidence) -> Evidence:
    last = replace(evidence.decisions[-1], after=EntryId("1-1"))
    return replace(evidence, decisions=(*evidence.decisions[:-1], last))


def _last_decision(evidence: Evidence, **changes: Any) -> Evidence:
    entry = evidence.decisions[-1]
    kind, decision = next((type(each), each) for told, each in Case(evidence).decisions if told is entry)
    return edited(evidence, kind, {"id": decision.id}, **changes)


def _epoch_falls(evidence: Evidence) -> Evidence:
    first: Any = Case(evidence).decisions[0][1]
    return _last_decision(evidence, epoch=first.epoch)


def _phases(evidence: Evidence) -> Evidence:
    phases = found(evidence, RecoveryFinished)[-1][1].phases
    return edited(
        evidence, RecoveryFinished, {}, phases=replace(phases, total=(phases.total or 0.0) + 1000.0)
    )


def _before_the_end(evidence: Evidence, decision: Any) -> Evidence:
    return decided_too(evidence, decision, before=found(evidence, RecoveryFinished)[-1][0])


def _alarm(evidence: Evidence) -> Evidence:
    epoch = found(evidence, RecoveryFinished)[-1][1].epoch
    alarm = Alarm(id=DecisionId("0-0"), epoch=epoch, reason="a test", kind="unproven", detail="nobody knows")
    return _before_the_end(evidence, alarm)


def _survivor_ordered(kind: type[Any]) -> Wrong:
    def wrong(evidence: Evidence) -> Evidence:
        said = found(evidence, kind, engine=_survivor(evidence))[0][1]
        return _before_the_end(evidence, said)

    return wrong


# --- processes and what is left ----------------------------------------------------------------------------


def _struck(evidence: Evidence, **changes: Any) -> Evidence:
    last = evidence.injections[-1]
    struck = (replace(last.struck[0], **changes), *last.struck[1:])
    return replace(evidence, injections=(*evidence.injections[:-1], replace(last, struck=struck)))


def _fewer(when: str, of: Callable[[Evidence], dict[str, Any]]) -> Wrong:
    def wrong(evidence: Evidence) -> Evidence:
        engine = of(evidence)["engine"]
        seen = next(each for each in getattr(evidence, when) if each.engine == engine)
        return look(evidence, when, engine, processes=seen.processes[1:])

    return wrong


def _proof(**changes: Any) -> Wrong:
    def wrong(evidence: Evidence) -> Evidence:
        proof = found(evidence, EngineStopped, **_dead(evidence))[0][1].proof
        fields = {name: change(proof) if callable(change) else change for name, change in changes.items()}
        return edited(evidence, EngineStopped, _dead(evidence), proof=replace(proof, **fields))

    return wrong


def _old(evidence: Evidence) -> tuple[Any, ...]:
    processes: tuple[Any, ...] = found(evidence, EngineStarted, **_dead(evidence))[0][1].processes
    return processes


def _took_one_over(evidence: Evidence) -> Evidence:
    new = found(evidence, EngineStarted, **_new(evidence))[0][1].processes
    shared = (*new, _old(evidence)[0])
    return _after(processes=tuple(sorted(shared)))(_of_new(EngineStarted, processes=shared)(evidence))


def _too_early(evidence: Evidence) -> Evidence:
    early = Request(
        **_new(evidence),
        time_ms=evidence.injections[-1].wall_ms - 1,
        method="POST",
        path=GENERATE,
        status=200,
    )
    return replace(evidence, requests=(*evidence.requests, early))


def _refused(evidence: Evidence) -> Evidence:
    served = Case(evidence).client_requests(since_ms=evidence.injections[-1].wall_ms)[0]
    return request(evidence, evidence.requests.index(served), status=503)


def _paused(evidence: Evidence) -> Evidence:
    since = evidence.injections[-1].wall_ms + 1
    pause = Request(
        engine=EngineName(_survivor(evidence)), incarnation=1, time_ms=since, method="POST",
        path="/pause?mode=keep", status=200,
    )  # fmt: skip
    return replace(evidence, requests=(*evidence.requests, pause))


def _broken(evidence: Evidence) -> Evidence:
    return replace(evidence, witnesses=tuple(replace(each, broken=1) for each in evidence.witnesses))


def _exit(evidence: Evidence) -> Evidence:
    return replace(evidence, exits={**evidence.exits, "agent": (1,)})


def _left(**changes: Any) -> Wrong:
    return lambda evidence: replace(evidence, left=replace(evidence.left, **changes))


FAULTS: dict[str, Fault] = {
    "both requests returned": Fault(_twice),
    "each has its full count of tokens": Fault(_shorter),
    "each ended by its length": Fault(partial(turn, mode="restart", finish_reason="stop")),
    "a finite logprob for each token": Fault(partial(_logprob, math.nan)),
    "tokens equal the references": Fault(_token),
    "logprobs equal the references": Fault(partial(_logprob, -0.25)),
    "version spans cover every token": Fault(partial(_spans, lambda v: ((v, 0, 30), (v, 31, 64)))),
    "every span is of the synced version": Fault(partial(_spans, lambda v: (("1.1", 0, 64),))),
    "both calls were interrupted in mid-stream": Fault(_piece("restart", 0, incarnation=2)),
    "the continued call kept its first tokens": Fault(_piece("continue", 0, token_ids=(511,))),
    "the continued call kept its first logprobs": Fault(_piece("continue", 0, logprobs=(-0.25,))),
    "the continued call asked only for the rest": Fault(_asked_again_for_all),
    "the restarted call was replayed whole": Fault(_went_on),
    "each token was delivered once": Fault(_delivered_again),
    "both calls ended on a living engine": Fault(_ended_nowhere),
    "one finite, nonzero optimizer step": Fault(partial(_trainer, largest_change=0.0)),
    "the step changed the tensors": Fault(lambda e: _trainer(e, base=e.trainer.tensors)),
    "no optimizer step during the recovery": Fault(partial(_trainer, steps_after=2)),
    "the trainer's boundary stayed open": Fault(_boundary),
    "the trainer ended with code 0": Fault(partial(_trainer, exit_code=1)),
    "the job was finished": Fault(lambda e: without(e, JobFinished)),
    "snapshot files equal their manifest": Fault(partial(_snapshot, wrong_files=("model.safetensors",))),
    "the manifest's digest is the published one": Fault(partial(_snapshot, digest="sha256:0")),
    "one set of bytes was published for the version": Fault(_published_otherwise),
    "snapshot tensors equal the trainer's": Fault(_other_tensor),
    "the replacement was given the published bytes": Fault(_of_new(WeightsLoaded, digest="sha256:0")),
    "engine checksums are equal before and after": Fault(_after(checksums={})),
    "the replacement bears the version": Fault(_after(label="default")),
    "fresh tokens equal the old references": Fault(_answers_otherwise("token_ids", 511)),
    "fresh logprobs equal the old references": Fault(_answers_otherwise("logprobs", -9.0)),
    "the canary was held against a reference": Fault(_of_new(VerifyEngine, reference=None)),
    "the canary is equal before and after": Fault(_canary),
    "the synced policy is not the base model's": Fault(_same_policy),
    "decisions stand in the order of the rules": Fault(_routed_before_proof),
    "facts stand in their order": Fault(_started_before_gone),
    "each fact answers a decision": Fault(_of_new(EngineStarted, answers=DecisionId("1-1"))),
    "one death was told": Fault(lambda e: told_too(e, found(e, EngineDead)[0][1])),
    "the death was told as it was": Fault(_of_dead(EngineDead, cause=Cause.EXIT, signal=None)),
    "the fence follows from the death": Fault(_of_dead(RouteFenced, cause=EntryId("1-1"))),
    "one fence of the dead incarnation": Fault(_decided_again(RouteFenced, _dead)),
    "one route of the replacement": Fault(_decided_again(RouteAdded, _new)),
    "the dead incarnation was never routed again": Fault(_decided_again(RouteAdded, _dead)),
    "the route names version and address": Fault(_of_new(RouteAdded, address="http://127.0.0.1:1")),
    "the slot was filled with its next incarnation": Fault(_of_new(StartEngine, node="elsewhere")),
    "only the replacement was synced": Fault(_synced_with_the_survivor),
    "the trainer was not asked": Fault(_asked_the_trainer, "snapshot"),
    "one recovery finished": Fault(lambda e: edited(e, RecoveryFinished, {}, outcome="cancelled")),
    "every entry decodes": Fault(_unknown),
    "nothing was parked": Fault(lambda e: replace(e, parked=1)),
    "decisions are chained without a gap": Fault(_unchained),
    "epochs never fall": Fault(_epoch_falls, "take-over"),
    "one epoch for each life of the orchestrator": Fault(partial(_last_decision, epoch=2**50)),
    "decision ids are unique": Fault(lambda e: _last_decision(e, id=found(e, SyncWeights)[0][1].id)),
    "every decision gives a reason": Fault(_of_new(RouteAdded, reason="")),
    "the recovery's phases add up": Fault(_phases),
    "no alarm was raised": Fault(_alarm),
    "the fault was what was planned": Fault(partial(_struck, signal=15)),
    "it struck the dead incarnation's own process": Fault(
        lambda e: _struck(e, process=found(e, EngineStarted, engine=_survivor(e))[0][1].processes[0])
    ),
    "every old process was alive before": Fault(_fewer("before", _dead)),
    "the proof names every recorded process": Fault(_proof(processes=lambda proof: proof.processes[1:])),
    "the proof has the port free": Fault(_proof(port_free=False)),
    "every old process is gone": Fault(lambda e: replace(e, old_alive=_old(e)[:1])),
    "the replacement has processes of its own": Fault(_took_one_over),
    "every process of the replacement is alive": Fault(_fewer("after", _new)),
    "no client reached it before its route": Fault(_too_early),
    "both calls were served again": Fault(_refused),
    "survivors are the same incarnation": Fault(_fewer("after", lambda e: {"engine": _survivor(e)})),
    "survivors were not fenced": Fault(_survivor_ordered(RouteFenced)),
    "survivors were given no order": Fault(_survivor_ordered(LoadWeights)),
    "survivors were neither paused nor aborted": Fault(_paused),
    "survivors generated on without a break": Fault(_broken),
    "every relight process ended cleanly": Fault(_exit),
    "no process is left": Fault(_left(processes=("4711 VLLM::EngineCore",))),
    "no port is left in use": Fault(_left(ports=(8000,))),
    "no shared memory is left": Fault(_left(segments=("psm_1",))),
    "no temporary folder is left": Fault(_left(scratch=("/tmp/left",))),
}


def _failing(evidence: Evidence) -> set[str]:
    return {finding.name for finding in audit(evidence) if not finding.passed}


@pytest.mark.parametrize("name", RECORDED)
def test_good_evidence_passes_every_check_and_there_are_at_least_thirty(name: str) -> None:
    findings = audit(recorded(name))
    assert [finding for finding in findings if not finding.passed] == []
    assert len(findings) >= 30


def test_every_check_has_its_fault_and_a_name_of_its_own() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert set(names) == set(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_exactly_the_check_whose_fault_is_injected_fails(name: str) -> None:
    fault = FAULTS[name]
    assert _failing(fault.wrong(recorded(fault.recording))) == {name}


def test_evidence_survives_the_way_through_a_file() -> None:
    evidence = recorded("two-engines")
    assert msgspec.json.decode(msgspec.json.encode(evidence), type=Evidence) == evidence
