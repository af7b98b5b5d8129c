"""The barrier as transcripts: one line an event, and what is said to it."""

from collections.abc import Callable, Iterable

import msgspec
import pytest

from relight.agents.trainer.barrier import (
    ANSWERS_KEPT,
    Barrier,
    Began,
    CaughtUp,
    Closed,
    Ended,
    Event,
    Moved,
    Opened,
    Use,
)
from relight.agents.trainer.turns import after
from relight.events.decisions import (
    BoundaryReleased,
    LoadWeights,
    ReportRequested,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
    SyncWeights,
)
from relight.events.errors import UsageError
from relight.events.facts import Fact, SafeBoundary, TrainerSilent, WeightsPublished, WeightsSynced
from relight.events.ids import DecisionId, EngineName, NodeName, SyncId
from relight.events.schema import Boundary, EngineState, Meta, OpenSync, Route, Snapshot
from relight.events.values import Member, Phase, Weights
from relight.events.version import Version

RUN = 7
V4, V5 = Version(RUN, 4), Version(RUN, 5)


def member(name: str, incarnation: int) -> Member:
    return Member(EngineName(name), incarnation, f"http://127.0.0.1:80{incarnation}")


def order(
    sync: str = "s1",
    *,
    run: int = RUN,
    boundary: int = 1,
    version: Version = V4,
    members: Iterable[Member] = (member("e0", 1), member("e1", 1)),
    epoch: int = 5,
    dry_run: bool = False,
) -> SyncWeights:
    return SyncWeights(
        id=DecisionId(f"{epoch}-1"),
        epoch=epoch,
        reason="test",
        sync=SyncId(sync),
        run=run,
        boundary=boundary,
        version=version,
        members=tuple(members),
        deadline=1000,
        dry_run=dry_run,
    )


def released(boundary: int = 1, *, run: int = RUN, epoch: int = 5, dry_run: bool = False) -> BoundaryReleased:
    return BoundaryReleased(
        id=DecisionId(f"{epoch}-2"),
        epoch=epoch,
        reason="test",
        run=run,
        boundary=boundary,
        outcome="done",
        dry_run=dry_run,
    )


def fenced(name: str, incarnation: int) -> RouteFenced:
    return RouteFenced(
        id=DecisionId("5-3"), epoch=5, reason="test", engine=EngineName(name), incarnation=incarnation
    )


def stopped(name: str, incarnation: int) -> StopEngine:
    return StopEngine(
        id=DecisionId("5-4"),
        epoch=5,
        reason="test",
        engine=EngineName(name),
        incarnation=incarnation,
        node=NodeName("a"),
        deadline=1,
    )


def added(name: str, incarnation: int) -> RouteAdded:
    return RouteAdded(
        id=DecisionId("5-5"),
        epoch=5,
        reason="test",
        engine=EngineName(name),
        incarnation=incarnation,
        address=member(name, incarnation).address,
        version=V4,
    )


def report(run: int = RUN) -> ReportRequested:
    return ReportRequested(id=DecisionId("5-6"), epoch=5, reason="test", run=run, deadline=1)


def done(sync: str = "s1", version: Version = V4) -> Ended:
    return Ended(WeightsPublished(sync=SyncId(sync), version=version, uri="/w", digest="sha256:00"))


def state(epoch: int = 5, **meta: object) -> CaughtUp:
    return CaughtUp(Snapshot(epoch=epoch, meta=Meta(birth="b", **meta)), tell=False)  # type: ignore[arg-type]


WAITING = Opened(4, V4, V4)
STEPPED = Opened(5, V4, None)
FULL = Opened(5, V5, V5, "all", "train")


def told(fact: Fact) -> str:
    match fact:
        case SafeBoundary():
            cut = f" cut off {fact.cut_off}" if fact.cut_off else ""
            return f"{fact.state} {fact.boundary} exports {fact.exports}{cut}"
        case WeightsPublished():
            return f"published {fact.sync} {fact.version}"
        case WeightsSynced() if fact.failed and not fact.loaded:
            touched = {failed.touched for failed in fact.failed}
            return f"{'void' if touched == {True} else 'refused'} {fact.sync}: {fact.failed[0].error}"
        case _:
            return type(fact).__name__


def play(*events: Event, barrier: Barrier | None = None) -> tuple[Barrier, list[list[str]]]:
    barrier = barrier or Barrier(run=RUN)
    said: list[list[str]] = []
    for event in events:
        step = after(barrier, event)
        barrier = step.barrier
        said.append([told(fact) for fact in step.facts])
    return barrier, said


OPEN = "open 1 exports 7.4"
CLOSE = "closed 1 exports None"

TRANSCRIPTS: dict[str, tuple[list[Event], list[list[str]]]] = {
    "an order inside its boundary is exported and answered": (
        [WAITING, order(), Began(), done(), Closed()],
        [[OPEN], [], [], ["published s1 7.4"], [CLOSE]],
    ),
    "two orders in one boundary are exported one after the other": (
        [WAITING, order("s1"), order("s2"), Began(), done("s1"), Began(), done("s2"), Closed()],
        [[OPEN], [], [], [], ["published s1 7.4"], [], ["published s2 7.4"], [CLOSE]],
    ),
    "an order is taken once however often it comes": (
        [WAITING, order(), order(), Began(), order(), done(), Closed()],
        [[OPEN], [], [], [], [], ["published s1 7.4"], [CLOSE]],
    ),
    "one that was answered gets the same answer again, also after the close": (
        [WAITING, order(), Began(), done(), order(), Closed(), order()],
        [[OPEN], [], [], ["published s1 7.4"], ["published s1 7.4"], [CLOSE], ["published s1 7.4"]],
    ),
    "an order that crosses the close is refused": (
        [WAITING, Closed(), order()],
        [[OPEN], [CLOSE], ["refused s1: boundary 1 is closed"]],
    ),
    "an order that waits at the close is refused": (
        [WAITING, order(), Closed()],
        [[OPEN], [], ["refused s1: boundary closed", CLOSE]],
    ),
    "an order for an older boundary is refused": (
        [WAITING, Closed(), WAITING, order(boundary=1)],
        [[OPEN], [CLOSE], ["open 2 exports 7.4"], ["refused s1: boundary 1 is closed"]],
    ),
    "an order for a boundary to come is refused": (
        [WAITING, order(boundary=9)],
        [[OPEN], ["refused s1: boundary 9 was never opened, 1 is open"]],
    ),
    "an order for another version is refused": (
        [WAITING, order(version=V5)],
        [[OPEN], ["refused s1: version 7.5 is not what the boundary exports: 7.4"]],
    ),
    "nothing is exported after an unsynced step": (
        [STEPPED, order()],
        [["open 1 exports None"], ["refused s1: version 7.4 is not what the boundary exports: None"]],
    ),
    "an order for an older run is refused once this run has spoken": (
        [order(run=6), WAITING, order(run=6)],
        [[], [OPEN], ["refused s1: run 6 is over, this is run 7"]],
    ),
    "an order for a newer run is not ours to refuse": (
        [WAITING, order(run=8)],
        [[OPEN], []],
    ),
    "a lower epoch has no effect": (
        [WAITING, order("s1", epoch=6), order("s2", epoch=5), released(epoch=5), Began(), done()],
        [[OPEN], [], [], [], [], ["published s1 7.4"]],
    ),
    "a dry run has no effect": (
        [WAITING, order(dry_run=True), Closed()],
        [[OPEN], [], [CLOSE]],
    ),
    "a report is answered with the boundary as it stands": (
        [report(), WAITING, report(), report(run=6), Closed(), report()],
        [[], [OPEN], [OPEN], [], [CLOSE], [CLOSE]],
    ),
    "a run that was called silent says where it stands": (
        [WAITING, TrainerSilent(run=RUN, since=0), TrainerSilent(run=6, since=0)],
        [[OPEN], [OPEN], []],
    ),
    "a close during an export cuts it off, and what it later reports is void": (
        [WAITING, order(), Began(), Closed(), done(), order()],
        [
            [OPEN],
            [],
            [],
            ["closed 1 exports None cut off s1"],
            [],
            ["refused s1: the boundary's close cut it off"],
        ],
    ),
    "swapped weights refuse what waits and are told": (
        [WAITING, order("s1"), Moved(None), order("s2"), Moved(V4), order("s3"), Began(), done("s3")],
        [
            [OPEN],
            [],
            ["refused s1: the boundary exports None now", "open 1 exports None"],
            ["refused s2: version 7.4 is not what the boundary exports: None"],
            [OPEN],
            [],
            [],
            ["published s3 7.4"],
        ],
    ),
}


@pytest.mark.parametrize("title", TRANSCRIPTS)
def test_transcripts(title: str) -> None:
    events, expected = TRANSCRIPTS[title]
    assert play(*events)[1] == expected


def test_a_cut_off_push_may_have_touched_everybody() -> None:
    _, said = play(WAITING, order(), Began(), Closed(), order(), barrier=Barrier(run=RUN, pushes=True))
    assert said[-1] == ["void s1: the boundary's close cut it off"]


def test_answers_name_what_they_answer() -> None:
    barrier, _ = play(WAITING)
    (fact,) = after(barrier, report()).facts
    assert isinstance(fact, SafeBoundary)
    assert fact.answers == "5-6"


RELEASES: dict[str, tuple[list[Event], str | None]] = {
    "it is released": ([FULL, released()], "done"),
    "not by another boundary's release": ([FULL, released(2)], None),
    "not by another run's": ([FULL, released(run=6)], None),
    "not by an older epoch's": ([FULL, order("x", epoch=9), released(epoch=5)], None),
    "not by one that came before it opened": ([FULL, Closed(), released(1), FULL], None),
    "not by the last one's": ([FULL, released(1), Closed(), FULL], None),
    "not by a dry run": ([FULL, released(dry_run=True)], None),
    "the state says it, where the decision was missed": (
        [FULL, state(boundary=Boundary(run=RUN, boundary=1, step=5, exports=V5, released=True))],
        "done",
    ),
    "the state says it of another boundary": (
        [FULL, state(boundary=Boundary(run=RUN, boundary=0, step=5, exports=V5, released=True))],
        None,
    ),
}


@pytest.mark.parametrize("title", RELEASES)
def test_releases(title: str) -> None:
    events, expected = RELEASES[title]
    assert play(*events)[0].released == expected


def test_an_orchestrator_that_only_observes_is_noticed() -> None:
    assert play(FULL, released(dry_run=True))[0].observed
    assert not play(FULL, released(2, dry_run=True))[0].observed


MISUSES: dict[str, tuple[list[Event], str]] = {
    "two boundaries at a time": ([WAITING, WAITING], "boundary 1 is still open"),
    "closing what is not open": ([Closed()], "no boundary is open"),
    "moving without one": ([Moved(None)], "no boundary is open"),
    "an export that no order asked for": ([WAITING, Began()], "no order asked for"),
    "two exports at a time": ([WAITING, order("s1"), order("s2"), Began(), Began()], "beside another one"),
}


@pytest.mark.parametrize("title", MISUSES)
def test_misuse_is_an_error(title: str) -> None:
    events, what = MISUSES[title]
    with pytest.raises(UsageError, match=what):
        play(*events)


def test_members_that_leave_are_known_to_the_export() -> None:
    events: list[Event] = [WAITING, fenced("e0", 1), order(), Began()]
    assert play(*events)[0].gone == set()  # fenced before the order, which names it all the same
    assert play(*events, fenced("e1", 1))[0].gone == {("e1", 1)}
    assert play(*events, stopped("e0", 1))[0].gone == {("e0", 1)}
    assert play(*events, stopped("e0", 2), fenced("e9", 1))[0].gone == set()


def test_the_roster_follows_what_was_committed() -> None:
    engines = {
        EngineName("e0"): EngineState(
            node=NodeName("a"),
            incarnation=1,
            phase=Phase.SERVING,
            route=Route(address=member("e0", 1).address, version=V4),
        ),
        EngineName("e1"): EngineState(node=NodeName("a"), incarnation=3, phase=Phase.STOPPING),
    }
    caught = CaughtUp(Snapshot(epoch=5, meta=Meta(birth="b"), engines=engines), tell=False)
    barrier, _ = play(caught)
    assert barrier.roster == {"e0": member("e0", 1)}
    barrier, _ = play(fenced("e0", 1), added("e0", 2), fenced("e0", 1), added("e1", 4), barrier=barrier)
    assert barrier.roster == {"e0": member("e0", 2), "e1": member("e1", 4)}


def load(name: str, version: Version, deadline: int = 60) -> LoadWeights:
    return LoadWeights(
        id=DecisionId("5-9"),
        epoch=5,
        reason="test",
        engine=EngineName(name),
        incarnation=1,
        version=version,
        uri=f"/w/{version}",
        digest="sha256:d",
        deadline=deadline,
    )


def start(name: str, version: Version | None) -> StartEngine:
    weights = Weights(version=version, uri="/w", digest="sha256:d") if version else None
    return StartEngine(
        id=DecisionId("5-9"),
        epoch=5,
        reason="test",
        engine=EngineName(name),
        incarnation=2,
        node=NodeName("a"),
        weights=weights,
        deadline=90,
    )


def test_a_version_is_in_use_from_the_word_to_load_it_to_the_next_word_to_that_engine() -> None:
    loading: list[Event] = [load("e0", V4), start("e1", V5)]
    assert play(*loading)[0].uses == {"e0": Use(V4, 60), "e1": Use(V5, 90)}
    assert play(*loading, fenced("e0", 1))[0].uses.keys() == {"e0", "e1"}  # its agent may only be cut off
    assert play(*loading, added("e0", 1))[0].uses.keys() == {"e1"}
    assert play(*loading, stopped("e1", 2), start("e0", None))[0].uses == {}
    assert play(*loading, load("e0", V5))[0].uses["e0"] == Use(V5, 60)
    dry = msgspec.structs.replace(load("e0", V4), dry_run=True)
    assert play(dry)[0].uses == {}


def test_versions_in_use_are_known_from_the_state_too() -> None:
    engines = {
        EngineName("e0"): EngineState(node=NodeName("a"), intent=load("e0", V4)),
        EngineName("e1"): EngineState(node=NodeName("a"), intent=start("e1", V5)),
        EngineName("e2"): EngineState(node=NodeName("a"), intent=stopped("e2", 1)),
    }
    caught = CaughtUp(Snapshot(epoch=5, meta=Meta(birth="b"), engines=engines), tell=False)
    assert play(load("e9", V4), caught)[0].uses == {"e0": Use(V4, 60), "e1": Use(V5, 90)}


def test_recoveries_are_pulled_where_the_trainer_has_snapshots_beside_its_push() -> None:
    pushing = Barrier(run=RUN, pushes=True, subset=False)
    ordinary, _ = play(FULL, barrier=pushing)
    (told,) = after(ordinary, report()).facts
    assert isinstance(told, SafeBoundary) and (told.pushes, told.subset) == (True, False)
    recovering, said = play(WAITING._replace(pulls=True), order(), Began(), Closed(), barrier=pushing)
    (told,) = after(recovering, report()).facts
    assert isinstance(told, SafeBoundary) and (told.pushes, told.subset) == (False, True)
    assert "s1" in said[-1][0]


def test_an_order_that_was_missed_is_found_in_the_state() -> None:
    caught = state(sync=OpenSync(order=order(), pending=()))
    _barrier, said = play(WAITING, caught, caught, Began(), done(), caught)
    assert said == [[OPEN], [], [], [], ["published s1 7.4"], ["published s1 7.4"]]


def test_after_the_bus_was_away_the_boundary_is_told_again() -> None:
    caught = CaughtUp(Snapshot(), tell=True)
    assert play(caught, WAITING, caught, Closed(), caught)[1] == [[], [OPEN], [OPEN], [CLOSE], [CLOSE]]


@pytest.mark.parametrize("event", [order(run=8), state(run=8)], ids=["order", "state"])
def test_a_newer_run_is_noticed(event: Event) -> None:
    assert play(WAITING, event)[0].newer == 8


def test_the_state_of_an_older_run_says_nothing() -> None:
    barrier, said = play(state(run=6, sync=OpenSync(order=order(run=6), pending=())))
    assert (barrier.newer, barrier.waiting, said) == (None, (), [[]])


def test_answers_kept_are_bounded() -> None:
    refused: list[Event] = [order(f"s{number}", boundary=9) for number in range(3 * ANSWERS_KEPT)]
    barrier, _ = play(WAITING, *refused)
    assert list(barrier.answers) == [f"s{number}" for number in range(2 * ANSWERS_KEPT, 3 * ANSWERS_KEPT)]


EVENTS: dict[str, Callable[[], Event]] = {
    "open": lambda: WAITING,
    "close": Closed,
    "order": order,
    "begin": Began,
    "end": done,
    "release": released,
    "fence": lambda: fenced("e0", 1),
    "report": report,
    "swap": lambda: Moved(None),
}


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("before", ["closed", "open", "ordered", "exporting"])
def test_no_export_runs_outside_an_open_boundary(name: str, before: str) -> None:
    events: dict[str, list[Event]] = {
        "closed": [],
        "open": [WAITING],
        "ordered": [WAITING, order()],
        "exporting": [WAITING, order(), Began()],
    }
    barrier, _ = play(*events[before])
    try:
        barrier = after(barrier, EVENTS[name]()).barrier
    except UsageError:
        return
    assert barrier.open or (barrier.running is None and not barrier.waiting)
