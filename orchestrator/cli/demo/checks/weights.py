"""Checks of the weights: exact bytes on disk, the same content in the replacement, by several witnesses."""

import hashlib

from relight.events.decisions import LoadWeights, StartEngine, VerifyEngine
from relight.events.envelope import Entry
from relight.events.facts import Healthy, WeightsLoaded, WeightsPublished
from relight.events.values import Canary
from relight.events.version import BASE
from relight.orchestrator.cli.demo.checks.case import Case, Check, Slot, Verdict, later, verdict
from relight.orchestrator.cli.demo.checks.samples import distance
from relight.orchestrator.cli.demo.evidence import MODES, Look

NOTHING = hashlib.sha256().hexdigest()
"""The hash of nothing, with which vLLM's CPU build answers for packed layers: it proves nothing."""


def _files(case: Case) -> Verdict:
    snapshot = case.evidence.snapshot
    return verdict(snapshot.wrong_files, f"{snapshot.files} files, size and sha256")


def _digest(case: Case) -> Verdict:
    published = _publications(case)
    found = case.evidence.snapshot.digest
    wanted = published[0].digest if published else "none"
    return Verdict(found == wanted, f"{found[:19]}… on disk, {wanted[:19]}… published")


def _republished(case: Case) -> Verdict:
    told = {(fact.uri, fact.digest) for fact in _publications(case)}
    return Verdict(len(told) == 1, f"{len(told)} place and digest for {case.version}")


def _tensors(case: Case) -> Verdict:
    disk, live = case.evidence.snapshot.tensors, case.evidence.trainer.tensors
    wrong = sorted(name for name in {*disk, *live} if disk.get(name) != live.get(name))
    return verdict([f"{name} differs" for name in wrong[:3]], f"{len(live)} tensors, byte for byte")


def _handed_over(case: Case) -> Verdict:
    """The digest that the replacement's loading (or start) named is the published one."""
    digests = [fact.digest for _, fact in case.told(WeightsLoaded, case.replacement)]
    digests += [
        order.weights.digest
        for _, order in case.told(StartEngine, case.replacement)
        if order.weights is not None
    ]
    orders = [order.digest for _, order in case.told(LoadWeights, case.replacement)]
    wanted = {fact.digest for fact in _publications(case)[:1]}
    right = bool(digests) and set(digests) | set(orders) == wanted
    return Verdict(right, f"{len(digests)} handed over to {case.replacement}, digest as published")


def _checksums(case: Case) -> Verdict:
    before = _sums(case.look(case.evidence.before, case.dead))
    after = _sums(case.look(case.evidence.after, case.replacement))
    differing = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    right = bool(before) and not differing
    return Verdict(right, f"{len(before)} real checksums before, {len(differing)} differ after")


def _sums(look: Look | None) -> dict[str, str]:
    return {name: sum_ for name, sum_ in look.checksums.items() if sum_ != NOTHING} if look else {}


def _label(case: Case) -> Verdict:
    look = case.look(case.evidence.after, case.replacement)
    label = look.label if look else "unseen"
    return Verdict(label == str(case.version), f"{case.replacement} says {label}")


def _fresh_tokens(case: Case) -> Verdict:
    before, after = _looks(case)
    wrong = [
        f"{mode} differs"
        for mode in MODES
        if not (before and after) or before.generations[mode].token_ids != after.generations[mode].token_ids
    ]
    return verdict(wrong, f"{case.replacement} repeats {case.dead} token for token")


def _fresh_logprobs(case: Case) -> Verdict:
    before, after = _looks(case)
    if before is None or after is None:
        return Verdict(False, "an engine was not seen")
    off = max(distance(before.generations[mode].logprobs, after.generations[mode].logprobs) for mode in MODES)
    return Verdict(
        off <= case.plan.tolerance, f"largest difference {off:.2g}, allowed {case.plan.tolerance:g}"
    )


def _looks(case: Case) -> tuple[Look | None, Look | None]:
    return case.look(case.evidence.before, case.dead), case.look(case.evidence.after, case.replacement)


def _canary_had_a_reference(case: Case) -> Verdict:
    orders = [order for _, order in case.told(VerifyEngine, case.replacement)]
    right = bool(orders) and all(order.reference is not None for order in orders)
    return Verdict(right, f"{len(orders)} VerifyEngine, each with a reference")


def _canary_equal(case: Case) -> Verdict:
    """The last canary at this version before the fault, of any engine, and the replacement's own."""
    old = [canary for entry, canary in _canaries(case) if not later(entry, case.fault.facts)]
    new = [canary for _, canary in _canaries(case, case.replacement)]
    if not old or not new:
        return Verdict(False, f"{len(old)} canaries before, {len(new)} after")
    off = distance(old[-1].logprobs, new[-1].logprobs)
    same = old[-1].tokens == new[-1].tokens and off <= case.plan.tolerance
    return Verdict(same, f"{len(new[-1].tokens)} tokens, largest difference {off:.2g}")


def _canaries(case: Case, slot: Slot | None = None) -> list[tuple[Entry, Canary]]:
    told = [(entry, fact) for entry, fact in case.told(Healthy, slot) if fact.version == case.version]
    return [(entry, fact.canary) for entry, fact in told if fact.canary is not None]


def _policy_moved(case: Case) -> Verdict:
    """The base model's canary and the synced version's are not the same: other weights answer."""
    base = [fact.canary for _, fact in case.told(Healthy) if fact.version == BASE and fact.canary is not None]
    new = [canary for _, canary in _canaries(case, case.replacement)]
    off = distance(base[0].logprobs, new[-1].logprobs) if base and new else 0.0
    return Verdict(off > case.plan.tolerance, f"its canary is {off:.2g} away from the base model's")


def _publications(case: Case) -> list[WeightsPublished]:
    return [fact for _, fact in case.told(WeightsPublished) if fact.version == case.version]


CHECKS = (
    Check("snapshot files equal their manifest", _files),
    Check("the manifest's digest is the published one", _digest),
    Check("one set of bytes was published for the version", _republished),
    Check("snapshot tensors equal the trainer's", _tensors),
    Check("the replacement was given the published bytes", _handed_over),
    Check("engine checksums are equal before and after", _checksums),
    Check("the replacement bears the version", _label),
    Check("fresh tokens equal the old references", _fresh_tokens),
    Check("fresh logprobs equal the old references", _fresh_logprobs),
    Check("the canary was held against a reference", _canary_had_a_reference),
    Check("the canary is equal before and after", _canary_equal),
    Check("the synced policy is not the base model's", _policy_moved),
)
