"""Which orchestrator shall hold which job, who is taken for alive, and when a job is taken or handed over."""

from collections import Counter

import pytest

from relight.events.bus.roll import Presence
from relight.events.decisions import ProbeEngine, ReportRequested
from relight.events.ids import BootId, DecisionId, EngineName, EntryId, JobName, NodeName
from relight.events.schema import EngineState, Meta, NodeRecord, Recovery, RecoveryId
from relight.orchestrator.core.job import Job
from relight.orchestrator.peers import ALIVE_S, BEAT_S, GONE_S, Peers
from relight.orchestrator.seats import (
    BACKOFF_S,
    DEFER_S,
    HAND_OVER_S,
    KEEP_S,
    LOOK_S,
    LOOK_SOON_S,
    PASS_OVER,
    WELL_S,
    Seat,
)
from relight.orchestrator.settings import Settings

JOBS = [JobName(f"job-{n}") for n in range(600)]
ME, OTHER, THIRD = "me", "other", "third"


def peers(*others: str, since_s: float = 0.0) -> Peers:
    known = Peers(ME)
    known.look({name: Presence(1) for name in (ME, *others)}, now_s=since_s)
    return known


def beats(known: Peers, *others: str, until_s: float) -> None:
    """The others advance, beat for beat."""
    seq, now_s = 2, BEAT_S
    while now_s <= until_s:
        known.look({name: Presence(seq) for name in (ME, *others)}, now_s=now_s)
        seq, now_s = seq + 1, now_s + BEAT_S


def held(known: Peers, *, now_s: float = 0.0) -> dict[JobName, str]:
    return {job: known.preferred(job, now_s=now_s) for job in JOBS}


def job(**meta: object) -> Job:
    return Job(7, Settings(), Meta(birth="x", **meta), {})  # type: ignore[arg-type]


def seat(name: JobName = JOBS[0]) -> Seat:
    return Seat(name, Settings())


def jobs_of(holder: str, known: Peers) -> list[JobName]:
    return [name for name, preferred in held(known).items() if preferred == holder]


# --- peers -----------------------------------------------------------------------------------------


def test_jobs_are_spread_evenly_and_everybody_agrees() -> None:
    mine = held(peers(OTHER, THIRD))
    others = Peers(OTHER)
    others.look({name: Presence(9) for name in (THIRD, OTHER, ME)}, now_s=0.0)
    assert held(others) == mine
    assert all(150 < share < 250 for share in Counter(mine.values()).values())


def test_one_that_ends_moves_its_own_jobs_and_no_other() -> None:
    before, after = held(peers(OTHER, THIRD)), held(peers(OTHER))
    assert {job for job in JOBS if before[job] != after[job]} == {job for job in JOBS if before[job] == THIRD}


def test_one_whose_number_stands_still_is_dead_and_then_removed() -> None:
    known = peers(OTHER)
    told = {ME: Presence(1), OTHER: Presence(1)}
    assert known.look(told, now_s=ALIVE_S) == []
    assert known.is_alive(OTHER, now_s=ALIVE_S)
    assert not known.is_alive(OTHER, now_s=ALIVE_S + 0.1)
    assert set(held(known, now_s=ALIVE_S + 0.1).values()) == {ME}
    assert known.look(told, now_s=GONE_S + 0.1) == [OTHER]
    known.look({ME: Presence(1)}, now_s=GONE_S + 0.2)
    assert known.there_s(OTHER, now_s=GONE_S + 0.2) == 0.0


def test_one_that_comes_back_counts_from_its_return() -> None:
    known = peers(OTHER)
    beats(known, OTHER, until_s=2.0)
    assert known.there_s(OTHER, now_s=2.0) == 2.0
    known.look({OTHER: Presence(50)}, now_s=9.0)
    assert known.there_s(OTHER, now_s=10.0) == 1.0


def test_one_that_serves_some_jobs_is_preferred_for_none_but_them() -> None:
    known = Peers(ME)
    known.look({OTHER: Presence(1, jobs=(JOBS[0], JOBS[1]))}, now_s=0.0)
    assert set(jobs_of(OTHER, known)) <= {JOBS[0], JOBS[1]}
    known.look({OTHER: Presence(2)}, now_s=0.1)
    assert len(jobs_of(OTHER, known)) > 200


# --- taking ----------------------------------------------------------------------------------------


def test_who_is_preferred_takes_a_free_lease_at_once_and_the_others_a_little_later() -> None:
    known = peers(OTHER)
    mine, others = seat(jobs_of(ME, known)[0]), seat(jobs_of(OTHER, known)[0])
    assert mine.shown(None, known, now_s=1.0)
    assert not others.shown(None, known, now_s=1.0)
    assert not others.shown(None, known, now_s=1.0 + DEFER_S / 2)
    assert others.shown(None, known, now_s=1.01 + DEFER_S)


def test_a_lease_that_was_taken_meanwhile_is_left_anew_to_who_is_preferred() -> None:
    known = peers(OTHER)
    others = seat(jobs_of(OTHER, known)[0])
    assert not others.shown(None, known, now_s=1.0)
    assert not others.shown(OTHER, known, now_s=1.1)
    assert not others.shown(None, known, now_s=1.2 + DEFER_S)


def test_the_lease_of_one_who_is_gone_is_looked_at_more_often() -> None:
    known, looked = peers(OTHER), seat()
    looked.shown(OTHER, known, now_s=1.0)
    assert looked.look_at_s == 1.0 + LOOK_S
    looked.shown(OTHER, known, now_s=ALIVE_S + 1.0)
    assert looked.look_at_s == ALIVE_S + 1.0 + LOOK_SOON_S


# --- handing over ----------------------------------------------------------------------------------


def test_a_job_is_handed_to_one_who_has_been_there_for_a_while() -> None:
    known = peers(OTHER)
    held_by_me = seat(jobs_of(OTHER, known)[0])
    beats(known, OTHER, until_s=HAND_OVER_S - BEAT_S)
    assert held_by_me.heir(known, stands=job(), now_s=HAND_OVER_S - BEAT_S) is None
    beats(known, OTHER, until_s=HAND_OVER_S)
    assert held_by_me.heir(known, stands=job(), now_s=HAND_OVER_S) == OTHER
    assert seat(jobs_of(ME, known)[0]).heir(known, stands=job(), now_s=HAND_OVER_S) is None


def test_a_job_that_came_back_is_kept_for_a_while() -> None:
    known = peers(OTHER)
    held_by_me = seat(jobs_of(OTHER, known)[0])
    held_by_me.handed_over(now_s=HAND_OVER_S)
    beats(known, OTHER, until_s=HAND_OVER_S + KEEP_S)
    assert held_by_me.heir(known, stands=job(), now_s=HAND_OVER_S + KEEP_S - 0.1) is None
    assert held_by_me.heir(known, stands=job(), now_s=HAND_OVER_S + KEEP_S) == OTHER


NODE = NodeName("a")
ASKED = ReportRequested(id=DecisionId("7-1"), epoch=7, reason="x", node=NODE, deadline=1)
PROBE = ProbeEngine(
    id=DecisionId("7-2"), epoch=7, reason="x", engine=EngineName("e"), incarnation=1, deadline=1
)
LOST = Recovery(id=RecoveryId("r"), incarnation=1, why="x", began=1)


@pytest.mark.parametrize(
    "stands",
    [
        job(nodes={NODE: NodeRecord(boot=BootId("b"), asked=ASKED)}),
        job()._replace(engines={EngineName("e"): EngineState(node=NODE, intent=PROBE)}),
        job()._replace(engines={EngineName("e"): EngineState(node=NODE, recovery=LOST)}),
    ],
    ids=["an unanswered report", "an open step", "a recovery"],
)
def test_a_job_in_which_something_is_under_way_is_kept(stands: Job) -> None:
    known = peers(OTHER)
    beats(known, OTHER, until_s=HAND_OVER_S)
    assert seat(jobs_of(OTHER, known)[0]).heir(known, stands=stands, now_s=HAND_OVER_S) is None


# --- failing ---------------------------------------------------------------------------------------


def test_a_job_whose_terms_fail_is_tried_again_ever_more_seldom() -> None:
    failing = seat()
    waits = [failing.failed(None, lasted_s=0.1, now_s=0.0) for _ in range(9)]
    assert waits == [*BACKOFF_S, BACKOFF_S[-1], BACKOFF_S[-1]]
    assert failing.failed(None, lasted_s=WELL_S, now_s=0.0) == BACKOFF_S[0]


def test_an_entry_that_term_after_term_fails_on_is_passed_over() -> None:
    failing, entry = seat(), EntryId("5-0")
    for _ in range(PASS_OVER - 1):
        failing.failed(entry, lasted_s=0.1, now_s=0.0)
    assert failing.careful
    assert failing.passed_over == set()
    failing.failed(entry, lasted_s=0.1, now_s=0.0)
    assert failing.passed_over == {entry}
