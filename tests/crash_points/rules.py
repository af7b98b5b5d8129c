"""What must hold of a case, whoever died in it. Nobody of relight is asked for its own opinion.

The evidence: both streams and the state as they stand on the server, the engines' own notes of their lives,
the watcher's sights, the victims' traces, and what the engines answer.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from relight.events.decisions import (
    LoadWeights,
    RecoveryFinished,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
    VerifyEngine,
)
from tests.crash_points.evidence import Seen
from tests.crash_points.layout import BYSTANDER, STRUCK, checksums
from tests.crash_points.points import commits_done, commits_under_way


def broken(seen: Seen) -> list[str]:
    """The rules that do not hold, each with what shows it."""
    return [f"{rule.__name__[1:].replace('_', ' ')}: {text}" for rule in RULES for text in rule(seen)]


def _an_incarnation_lives_once(seen: Seen) -> Iterator[str]:
    counts = Counter((life.engine, life.incarnation) for life in seen.lives)
    yield from (f"{engine}.{number} was started {n} times" for (engine, number), n in counts.items() if n > 1)


def _two_incarnations_never_live_at_once(seen: Seen) -> Iterator[str]:
    for sight in seen.sights[seen.before.sights :]:
        if sight.what == "two":
            yield f"{sight.slot} and {sight.other}"


def _the_watcher_sees(seen: Seen) -> Iterator[str]:
    seen_slots = {(sight.slot.engine, sight.slot.incarnation) for sight in seen.sights}
    for name, engine in seen.after.engines.items():
        if (name, engine.incarnation) not in seen_slots:
            yield f"{name}.{engine.incarnation} serves and was never seen"


def _decisions_stand_in_one_chain(seen: Seen) -> Iterator[str]:
    last = seen.before.snapshot.tail
    for entry in seen.entries:
        if entry.after != last:
            yield f"{entry.entry_id} {entry.type} follows {entry.after}, not {last}"
        last = entry.entry_id
    if seen.after.tail != last:
        yield f"the state's tail is {seen.after.tail}, the stream's {last}"
    for one, next_ in pairwise(seen.decisions):
        if next_.epoch < one.epoch:
            yield f"{next_.id} of epoch {next_.epoch} stands behind {one.id}"


def _each_commit_stands_once(seen: Seen) -> Iterator[str]:
    """In the order in which their callers had them done, and none whose caller died before it.

    One that was under way when its caller died stands where nobody else has its number.
    """
    told = commits_done(seen.passes)
    numbers = {number for _, number in told}
    under_way = {key: names for key, names in commits_under_way(seen.passes).items() if key[1] not in numbers}
    done = {key: names for key, names in sorted((told | under_way).items()) if key[1] <= seen.after.commit}
    stands = [decision.id for decision in seen.decisions]
    ids = [name for names in done.values() for name in names]
    if stands != ids:
        odd = [*(set(ids) - set(stands)), *(set(stands) - set(ids))]
        yield f"{len(ids)} decisions were committed, {len(stands)} stand; not in both: {odd or 'order'}"
    if seen.after.commit - seen.before.snapshot.commit != len(done):
        yield f"{len(done)} commits, numbers from {seen.before.snapshot.commit} to {seen.after.commit}"


def _each_recovery_ends_once(seen: Seen) -> Iterator[str]:
    ids = {each.recovery for each in seen.decisions if each.recovery is not None}
    ends = Counter(each.recovery for each in seen.decisions if isinstance(each, RecoveryFinished))
    yield from (f"{recovery} ended {ends[recovery]} times" for recovery in ids if ends[recovery] != 1)
    outcomes = [each.outcome for each in seen.decisions if isinstance(each, RecoveryFinished)]
    if not outcomes or outcomes[-1] != "done" or set(outcomes) - {"done", "superseded"}:
        yield f"they ended as {outcomes}"


def _each_proof_is_routed_once(seen: Seen) -> Iterator[str]:
    proofs = Counter((d.engine, d.incarnation) for d in seen.decisions if isinstance(d, VerifyEngine))
    routes = Counter((d.engine, d.incarnation) for d in seen.decisions if isinstance(d, RouteAdded))
    yield from (f"{slot} was routed {n} times" for slot, n in routes.items() if n > proofs[slot])
    if routes != Counter([(STRUCK, seen.after.engines[STRUCK].incarnation)]):
        yield f"routed were {dict(routes)}"


def _a_death_costs_one_incarnation(seen: Seen) -> Iterator[str]:
    """And an agent that dies while it starts one may cost another; an orchestrator that dies costs none."""
    spent = seen.after.engines[STRUCK].incarnation - seen.before.snapshot.engines[STRUCK].incarnation
    agents = sum(death.point.role == "agent" for death in seen.deaths)
    if not 1 <= spent <= 1 + agents:
        yield f"{spent} incarnations with {agents} deaths of the agent"
    if len(seen.lives) - seen.before.lives > spent:
        yield f"{len(seen.lives) - seen.before.lives} lives for {spent} incarnations"


def _what_serves_has_the_right_weights(seen: Seen) -> Iterator[str]:
    for name, engine in seen.after.engines.items():
        spoken = seen.answers.get(name)
        if spoken is None or engine.route is None:
            yield f"{name} is not routed"
        elif spoken != seen.reference or spoken.checksums != checksums():
            yield f"{name} at {engine.route.address} answers {spoken}, not {seen.reference}"
        elif spoken.label != str(engine.route.version):
            yield f"{name} is routed at {engine.route.version} and says {spoken.label}"


def _the_bystander_is_left_alone(seen: Seen) -> Iterator[str]:
    for each in seen.decisions:
        touches = isinstance(
            each, RouteFenced | StopEngine | StartEngine | LoadWeights | VerifyEngine | RouteAdded
        )
        if touches and each.engine == BYSTANDER:  # type: ignore[union-attr]
            yield f"{type(each).__name__}: {each.reason}"
    before, after = seen.before.snapshot.engines[BYSTANDER], seen.after.engines[BYSTANDER]
    if (before.incarnation, before.route, before.processes) != (
        after.incarnation,
        after.route,
        after.processes,
    ):
        yield f"it was {before}, it is {after}"
    for path in ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/abort_requests"):
        if f'"POST {path}' in seen.bystander_log:
            yield f"somebody called {path}"


def _nothing_of_the_dead_is_left(seen: Seen) -> Iterator[str]:
    yield from seen.remains


def _nobody_ends_unasked(seen: Seen) -> Iterator[str]:
    yield from seen.unasked


def _nothing_is_parked(seen: Seen) -> Iterator[str]:
    if seen.parked:
        yield f"{seen.parked} entries"


RULES = (
    _an_incarnation_lives_once,
    _two_incarnations_never_live_at_once,
    _the_watcher_sees,
    _decisions_stand_in_one_chain,
    _each_commit_stands_once,
    _each_recovery_ends_once,
    _each_proof_is_routed_once,
    _a_death_costs_one_incarnation,
    _what_serves_has_the_right_weights,
    _the_bystander_is_left_alone,
    _nothing_of_the_dead_is_left,
    _nobody_ends_unasked,
    _nothing_is_parked,
)
