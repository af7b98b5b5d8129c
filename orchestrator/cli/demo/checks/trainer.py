"""Checks of the trainer: one real step, none while the engine was recovered, a clean end."""

import math

from relight.events.decisions import RouteAdded
from relight.events.facts import JobFinished, SafeBoundary
from relight.orchestrator.cli.demo.checks.case import Case, Check, Verdict, later, verdict


def _one_step(case: Case) -> Verdict:
    trainer = case.evidence.trainer
    real = (
        math.isfinite(trainer.loss) and math.isfinite(trainer.largest_change) and trainer.largest_change > 0
    )
    detail = f"loss {trainer.loss:.4f}, largest parameter change {trainer.largest_change:.3g}"
    return Verdict(real, detail)


def _step_changed(case: Case) -> Verdict:
    trainer = case.evidence.trainer
    changed = [name for name, tensor in trainer.tensors.items() if trainer.base.get(name) != tensor]
    return Verdict(len(changed) > 0, f"{len(changed)} of {len(trainer.tensors)} tensors have other bytes")


def _no_step_meanwhile(case: Case) -> Verdict:
    trainer = case.evidence.trainer
    after = trainer.tensors_after
    wrong = [] if trainer.steps_before == trainer.steps_after == 1 else ["the count of steps moved"]
    wrong += [f"{name} moved" for name, was in trainer.tensors.items() if after.get(name) != was]
    return verdict(wrong[:3], f"{trainer.steps_after} step before and after, the same {len(after)} tensors")


def _boundary_stayed_open(case: Case) -> Verdict:
    """What the trainer had said last before the fault, and nothing else until the route was back."""
    said = case.told(SafeBoundary)
    before = [fact for entry, fact in said if not later(entry, case.fault.facts)]
    routed = case.decided(RouteAdded, case.replacement)
    if not before or not routed:
        return Verdict(False, f"{len(before)} boundaries told before the fault, {len(routed)} routes after")
    held = before[-1]
    wrong = [] if (held.state, held.exports) == ("open", case.version) else [f"{held.state}, {held.exports}"]
    for entry, fact in said:
        meanwhile = later(entry, case.fault.facts) and not later(entry, routed[0][0].entry_id)
        if meanwhile and (fact.boundary, fact.state, fact.exports) != (held.boundary, "open", case.version):
            wrong.append(f"boundary {fact.boundary} {fact.state}, exports {fact.exports}, in between")
    return verdict(wrong, f"boundary {held.boundary} at step {held.step} exported {held.exports} throughout")


def _exit(case: Case) -> Verdict:
    code = case.evidence.trainer.exit_code
    return Verdict(code == 0, f"exit code {code}")


def _finished(case: Case) -> Verdict:
    runs = [fact.run for _, fact in case.happened(JobFinished)]
    return Verdict(runs == [case.evidence.trainer.run], f"JobFinished of runs {runs}")


CHECKS = (
    Check("one finite, nonzero optimizer step", _one_step),
    Check("the step changed the tensors", _step_changed),
    Check("no optimizer step during the recovery", _no_step_meanwhile),
    Check("the trainer's boundary stayed open", _boundary_stayed_open),
    Check("the trainer ended with code 0", _exit),
    Check("the job was finished", _finished),
)
