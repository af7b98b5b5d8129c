"""The small parts of a trainer's session: callbacks, the rule for a lost orchestrator, lanes."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from relight.agents.trainer.alone import Alone
from relight.agents.trainer.callback import CallbackSync
from relight.agents.trainer.lanes import Lane
from relight.agents.trainer.patience import End, OrchestratorLost
from relight.agents.trainer.settings import Settings
from relight.agents.trainer.sync import Left
from relight.events.decisions import SyncWeights
from relight.events.errors import UsageError
from relight.events.ids import DecisionId, EngineName, SyncId
from relight.events.values import Failed, Loaded, Member
from relight.events.version import Version

E0 = Member(EngineName("e0"), 1, "http://a")
E1 = Member(EngineName("e1"), 2, "http://b")


def order(*members: Member, sync: str = "s") -> SyncWeights:
    return SyncWeights(
        id=DecisionId("1-1"),
        epoch=1,
        reason="test",
        sync=SyncId(sync),
        run=7,
        boundary=1,
        version=Version(7, 4),
        members=members,
        deadline=0,
    )


def left(*members: Member, gone: tuple[Member, ...] = ()) -> Left:
    return Left(members, lambda member: member in gone)


def test_a_callback_is_called_once_a_version() -> None:
    calls: list[Any] = []
    sync = CallbackSync(lambda version, members, left: calls.append(members))
    assert sync.export(order(), left()).loaded == ()
    assert sync.exportable(Version(7, 4))
    assert sync.export(order(E0), left(E0)).loaded == (Loaded(E0.engine, 1),)
    assert not sync.exportable(Version(7, 4))
    (failed,) = sync.export(order(E1), left(E1)).failed
    assert failed == Failed(E1.engine, 2, "7.4 was pushed once and the callback is not idempotent", False)
    assert calls == [(E0,)]


def test_an_idempotent_callback_is_called_again() -> None:
    calls: list[Any] = []
    sync = CallbackSync(lambda version, members, left: calls.append(members), idempotent=True)
    for member in (E0, E1):
        assert sync.export(order(member), left(member)).loaded
    assert calls == [(E0,), (E1,)]


def test_a_member_that_left_before_is_not_named_and_not_touched() -> None:
    calls: list[Any] = []
    sync = CallbackSync(lambda version, members, left: calls.append(members))
    synced = sync.export(order(E0, E1), left(E0, E1, gone=(E1,)))
    assert calls == [(E0,)]
    assert synced.failed == (Failed(E1.engine, 2, "left", False),)


@pytest.mark.parametrize(
    ("answer", "what"), [({"e9": "x"}, r"named \['e9'\]"), ([E0], "expected {engine: error}")]
)
def test_a_wrong_answer_of_a_callback_is_told(answer: Any, what: str) -> None:
    def push(version: Version, members: tuple[Member, ...], left: Left) -> Mapping[str, str]:
        result: Mapping[str, str] = answer
        return result

    with pytest.raises(UsageError, match=what):
        CallbackSync(push).export(order(E0), left(E0))


def test_left_is_a_live_view() -> None:
    gone: set[Member] = set()
    view = Left((E0, E1), gone.__contains__)
    assert (list(view), len(view), "e1" in view) == ([], 0, False)
    gone.add(E1)
    assert (list(view), len(view), "e1" in view) == (["e1"], 1, True)


LONG, SHORT = 700.0, 40.0

RULES: dict[str, tuple[Settings, bool, bool, End, float, bool | None]] = {
    # settings, pushes, synced before, end, seconds absent -> weights go on (None: an error)
    "a push needs no orchestrator": (Settings(), True, True, End.ABSENT, SHORT, True),
    "not even for its first sync": (Settings(), True, False, End.ABSENT, SHORT, True),
    "a pull is left out for a while": (Settings(), False, True, End.ABSENT, SHORT, False),
    "and then raised": (Settings(), False, True, End.ABSENT, LONG, None),
    "as is the first one": (Settings(), False, False, End.ABSENT, SHORT, None),
    "one that is held by silence is raised": (Settings(), False, True, End.SILENT, 0.0, None),
    "raise is raise": (Settings(on_lost="raise"), True, True, End.ABSENT, SHORT, None),
    "sync is sync": (Settings(on_lost="sync"), False, False, End.ABSENT, LONG, True),
    "unsynced is left out": (Settings(on_lost="unsynced"), True, True, End.ABSENT, LONG, False),
    "an observer holds nobody": (Settings(on_lost="raise"), False, False, End.OBSERVED, 0.0, True),
}


@pytest.mark.parametrize("title", RULES)
def test_the_rule_for_a_lost_orchestrator(title: str) -> None:
    settings, pushes, before, end, absent_s, expected = RULES[title]
    alone = Alone(settings, pushes=pushes)
    if before:
        alone.synced()
    if expected is None:
        with pytest.raises(OrchestratorLost):
            alone.goes_on(end, absent_s=absent_s)
    else:
        assert alone.goes_on(end, absent_s=absent_s) is expected


def test_only_so_many_syncs_in_a_row_are_left_out() -> None:
    alone = Alone(Settings(max_unsynced_steps=2), pushes=False)
    assert alone.grace_s == Settings().orphan_deadline_s
    for _ in range(2):
        alone.synced()
        assert alone.grace_s == Settings().orchestrator_grace_s
        assert not alone.goes_on(End.ABSENT, absent_s=SHORT)
        assert not alone.goes_on(End.ABSENT, absent_s=SHORT)
        with pytest.raises(OrchestratorLost, match="2 syncs in a row"):
            alone.goes_on(End.ABSENT, absent_s=SHORT)


def test_closing_a_lane_cancels_what_runs_in_it() -> None:
    lane, begun, ended = Lane(), threading.Event(), threading.Event()

    async def endless() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    work = lane.start(endless)
    assert begun.wait(10)
    lane.close()
    assert ended.is_set()
    assert isinstance(work.future.exception(10), BaseException)


def test_cancelling_gives_a_coroutine_the_time_to_clean_up() -> None:
    lane, begun, cleaned = Lane(), threading.Event(), threading.Event()

    async def careful() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    work = lane.start(careful)
    assert begun.wait(10)
    work.cancel()
    assert cleaned.is_set()
    lane.close()
