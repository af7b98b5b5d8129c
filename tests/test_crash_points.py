"""Crash points in their short form: a few deaths in real processes; a rule that cannot break is no rule."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.crash_points.evidence import Seen
from tests.crash_points.lanes import visit_all
from tests.crash_points.layout import BYSTANDER, STRUCK
from tests.crash_points.points import Committed, Pass, Point, apart, case_of, commits_under_way, name_of
from tests.crash_points.rules import RULES, broken
from tests.crash_points.visit import Visit
from tests.crash_points.watcher import Sight, Slot

CASES = (
    "",
    "orchestrator after commit RouteFenced+StopEngine #1",
    "agent after spawn engine #1",
    "orchestrator before commit StartEngine #1 & agent after put EngineStarted #1",
)
"""No death; one of each process; both, one after the other, at points that no batching of facts renames."""


def at(pid: int, when: str, what: str, *, stretch: int) -> Pass:
    return Pass(case=1, pid=pid, deaths=0, stretch=stretch, point=Point("agent", when, what, 1))  # type: ignore[arg-type]


def test_a_case_is_found_again_by_its_name() -> None:
    case = case_of(CASES[-1])
    assert [point.role for point in case] == ["orchestrator", "agent"]
    assert name_of(case) == CASES[-1]
    assert case_of(name_of(())) == ()
    with pytest.raises(ValueError, match="no point"):
        case_of("agent before")


def test_points_with_nothing_between_them_are_one_and_those_of_two_processes_are_not() -> None:
    passes = [
        at(1, "before", "write", stretch=7),
        at(1, "after", "write", stretch=7),
        at(2, "before", "commit", stretch=7),
        at(1, "before", "fsync", stretch=7),
        at(1, "after", "fsync", stretch=7),
        at(1, "before", "call", stretch=8),
    ]
    assert [(each.when, each.what) for each in apart(passes) if each.what != "commit"] == [
        ("before", "write"),
        ("before", "fsync"),
        ("after", "fsync"),
        ("before", "call"),
    ]


def test_a_commit_is_under_way_where_its_caller_had_sent_it_and_died_elsewhere() -> None:
    def commit(pid: int, when: str, number: int, *, dies: bool = False) -> Pass:
        one = at(pid, when, "commit", stretch=number)
        return msgspec.structs.replace(one, commit=Committed(5, number, (f"5-{number}",)), dies=dies)

    sent, done = commit(1, "before", 7), [commit(1, "before", 6), commit(1, "after", 6)]
    elsewhere = msgspec.structs.replace(at(1, "before", "look", stretch=8), dies=True)
    assert commits_under_way([*done, sent, elsewhere]) == {(5, 7): ("5-7",)}
    assert commits_under_way([*done, sent]) == {}, "its caller lives, and says it again"
    assert commits_under_way([*done, commit(1, "before", 7, dies=True)]) == {}, "it was never sent"


@pytest.fixture(scope="module")
async def visits() -> list[Visit]:
    """The cases, one after the other in one world."""
    found: list[Visit] = []

    def tell(one: Visit, folder: Path) -> None:
        found.append(one)
        assert not one.broken, f"{one.name or 'no death'}, everything is in {folder}: {one.broken}"

    await visit_all([case_of(name) for name in CASES], tell, lanes=1)
    return found


async def test_whoever_dies_in_a_recovery_it_ends_once_and_with_the_right_weights(
    visits: list[Visit],
) -> None:
    assert [(found.name, found.reached) for found in visits] == [(name, True) for name in CASES]


Tampered = Callable[[Seen], Seen]


def _twice(seen: Seen) -> Seen:
    return seen._replace(lives=[*seen.lives, seen.lives[-1]])


def _two_at_once(seen: Seen) -> Seen:
    two = Sight("two", Slot(STRUCK, 1), other=Slot(STRUCK, 2))
    return seen._replace(sights=[*seen.sights, two])


def _blind(seen: Seen) -> Seen:
    return seen._replace(sights=[])


def _lost_decision(seen: Seen) -> Seen:
    return seen._replace(entries=seen.entries[:1] + seen.entries[2:])


def _lost_commit(seen: Seen) -> Seen:
    return seen._replace(after=msgspec.structs.replace(seen.after, commit=seen.after.commit - 1))


def _no_end(seen: Seen) -> Seen:
    return seen._replace(entries=[each for each in seen.entries if each.type != "RecoveryFinished"])


def _no_proof(seen: Seen) -> Seen:
    return seen._replace(entries=[each for each in seen.entries if each.type != "VerifyEngine"])


def _one_more(seen: Seen) -> Seen:
    engine = seen.after.engines[STRUCK]
    more = msgspec.structs.replace(engine, incarnation=engine.incarnation + 1)
    return seen._replace(
        after=msgspec.structs.replace(seen.after, engines={**seen.after.engines, STRUCK: more})
    )


def _other_weights(seen: Seen) -> Seen:
    told = seen.answers[STRUCK]._replace(checksums={"model.weight": "0"})
    return seen._replace(answers={**seen.answers, STRUCK: told})


def _paused_bystander(seen: Seen) -> Seen:
    return seen._replace(bystander_log='INFO: 127.0.0.1 - "POST /pause?mode=abort HTTP/1.1" 200')


def _folder_left(seen: Seen) -> Seen:
    return seen._replace(remains=["folder /tmp/relight-1"])


def _fell_over(seen: Seen) -> Seen:
    return seen._replace(unasked=["agent (pid 7) ended with code 1"])


def _parked(seen: Seen) -> Seen:
    return seen._replace(parked=1)


FORBIDDEN: dict[str, Tampered] = {
    "an incarnation lives once": _twice,
    "two incarnations never live at once": _two_at_once,
    "the watcher sees": _blind,
    "decisions stand in one chain": _lost_decision,
    "each commit stands once": _lost_commit,
    "each recovery ends once": _no_end,
    "each proof is routed once": _no_proof,
    "a death costs one incarnation": _one_more,
    "what serves has the right weights": _other_weights,
    "the bystander is left alone": _paused_bystander,
    "nothing of the dead is left": _folder_left,
    "nobody ends unasked": _fell_over,
    "nothing is parked": _parked,
}


async def test_each_rule_is_broken_by_what_it_forbids(visits: list[Visit]) -> None:
    seen = visits[0].seen
    assert seen is not None and broken(seen) == []
    assert seen.answers.keys() == {STRUCK, BYSTANDER}
    assert {rule.__name__[1:].replace("_", " ") for rule in RULES} == FORBIDDEN.keys()
    for rule, tamper in FORBIDDEN.items():
        said = broken(tamper(seen))
        assert any(text.startswith(f"{rule}: ") for text in said), f"{rule}: {said}"
