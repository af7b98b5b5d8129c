"""The exhaustive search in its short form: no rule breaks; a safeguard that is taken away is missed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from relight.events.facts import EngineDead, EngineStarted, EngineStopped, Healthy, WeightsLoaded
from relight.events.values import Phase
from relight.orchestrator.core import absorb, boundary, nodes, parts, step, sync
from relight.orchestrator.core.guards import Case, always
from relight.orchestrator.core.job import Work
from relight.orchestrator.core.table import NEXT
from relight.orchestrator.core.transition import transition
from tests.search.model import Model
from tests.search.plans import ONE, OVER_TWO_NODES, PULL, PUSH, TWO
from tests.search.search import Search
from tests.search.world import Plan

STATES = 20_000
"""Of each plan here; `make search` goes on for longer."""


@pytest.mark.parametrize("plan", (*ONE, *TWO, *OVER_TWO_NODES), ids=lambda plan: plan.name)
def test_no_rule_breaks_and_every_tail_settles(plan: Plan) -> None:
    found = Search(plan).run(states=STATES, seconds=60.0, tail_every=5)
    assert found.broken is None, "\n".join((found.broken, *found.trace))
    assert found.states >= STATES
    assert found.served > 0


@pytest.mark.parametrize("parts", [False, True])
def test_without_faults_all_of_it_is_seen_and_everybody_serves(*, parts: bool) -> None:
    plan = Plan("no fault", 0, frozenset(), parts=parts, warm=False)
    found = Search(plan).run(states=10**6, seconds=60.0)
    assert found.complete and found.broken is None
    assert found.served == found.tails == found.states


class Mutant(NamedTuple):
    """A safeguard that is taken away, and the rule that then breaks."""

    name: str
    rule: str
    take_away: Callable[[pytest.MonkeyPatch], None]
    kinds: tuple[str, ...]
    faults: int = 1
    pushes: bool = False
    parts: bool = False
    tail_every: int = 20


def _row(phase: Phase, fact: type, to: Phase) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setitem(NEXT, (phase, fact), {always: to})


def _any_incarnation(work: Work, fact: Any) -> None:
    if fact.engine in work.engines:
        transition(Case(work, fact.engine, fact))


def _any_proof(case: Case, fact: Healthy) -> None:
    intent = case.engine.intent
    _healthy(case, msgspec.structs.replace(fact, answers=intent.id) if intent else fact)


_healthy = absorb._LEARN[Healthy]


def _new_run_takes_no_route(work: Work, fact: Any) -> None:
    work.learn(run=fact.run, version=fact.version, finished=False, boundary=None, trainer_silent=False)


def _refused_for_good(work: Work, order: Any, *, why: str | None = None) -> None:
    if work.meta.boundary is not None:
        work.learn(boundary=msgspec.structs.replace(work.meta.boundary, refused=True, awaiting=()))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _true(*_: Any) -> bool:
    return True


def _false(*_: Any) -> bool:
    return False


MUTANTS = (
    Mutant(
        "facts of any incarnation are believed",
        "S3",
        lambda patch: patch.setattr(step, "_of_engine", _any_incarnation),
        ("death", "doubled"),
        faults=2,
    ),
    Mutant(
        "a load is a proof",
        "S1",
        _row(Phase.SYNCING, WeightsLoaded, Phase.SERVING),
        ("death",),
    ),
    Mutant(
        "a start is a proof",
        "S1",
        _row(Phase.STARTING, EngineStarted, Phase.SERVING),
        ("death",),
    ),
    Mutant(
        "a death is a proof that it is gone",
        "S2",
        _row(Phase.SERVING, EngineDead, Phase.BACKOFF),
        ("death",),
    ),
    Mutant(
        "a stop is never believed",
        "liveness",
        _row(Phase.STOPPING, EngineStopped, Phase.STOPPING),
        ("death",),
    ),
    Mutant(
        "the commit takes any epoch",
        "S10",
        lambda patch: patch.setattr(Model, "accepts", _true),
        ("orchestrator",),
    ),
    Mutant(
        "a report of an older epoch is taken",
        "S10",
        lambda patch: patch.setattr(nodes, "_answers", _true),
        ("death", "silence", "orchestrator"),
        faults=3,
    ),
    Mutant(
        "a proof of before is taken",
        "S1",
        lambda patch: patch.setitem(absorb._LEARN, Healthy, _any_proof),
        ("doubled", "silence", "failure"),
        faults=3,
    ),
    Mutant(
        "a new run takes no route away",
        "S9",
        lambda patch: patch.setattr(boundary, "_new_run", _new_run_takes_no_route),
        ("trainer",),
    ),
    Mutant(
        "a cut-off push touched nobody",
        "S",
        lambda patch: patch.setattr(sync, "_pushes", _false),
        ("trainer", "export"),
        pushes=True,
    ),
    Mutant(
        "another bus is trusted",
        "S",
        lambda patch: patch.setattr(step, "_trust_nobody", _nothing),
        ("bus", "death"),
        faults=2,
    ),
    Mutant(
        "healthy engines are synced with the stale ones",
        "S7",
        lambda patch: patch.setattr(sync, "_needs_sync", lambda work, name, _: sync._can_sync(work, name)),
        ("death",),
        pushes=True,
    ),
    Mutant(
        "a refused sync is never asked for again",
        "liveness",
        lambda patch: patch.setattr(sync, "_refused", _refused_for_good),
        ("export", "time"),
        faults=2,
        pushes=True,
        tail_every=1,
    ),
    Mutant(
        "the proof of one part is enough",
        "S2",
        lambda patch: patch.setattr(parts, "remaining", lambda engine: ()),
        ("death",),
        parts=True,
    ),
    Mutant(
        "the head alone is heard",
        "S10",
        lambda patch: patch.setattr(Work, "told", lambda work, engine: work.reported(engine.node)),
        ("death", "orchestrator"),
        faults=2,
        parts=True,
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_safeguard_that_is_taken_away_is_missed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        mutant.name,
        mutant.faults,
        frozenset(mutant.kinds),
        PUSH if mutant.pushes else PULL,
        mutant.pushes,
        mutant.parts,
    )
    search = Search(plan)
    mutant.take_away(monkeypatch)
    found = search.run(states=400_000, seconds=60.0, tail_every=mutant.tail_every)
    print(f"{mutant.name}: {found.broken} after {len(found.trace)} steps, {found.states:,} states")
    assert found.broken is not None
    assert mutant.rule in found.broken
