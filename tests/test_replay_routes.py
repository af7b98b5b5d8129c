"""Routes, as tables: what is said of an older incarnation, epoch or server has no effect."""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest

from relight.agents.replay.picks import REPLAYS_AT_ONCE
from relight.agents.replay.route import Key, Route, Wanted
from relight.agents.replay.routes import Freed, Moved, Routes, Spared
from relight.agents.replay.waiting import Queue
from relight.events.decisions import AnyDecision, LoadWeights, RouteAdded, RouteFenced, SyncWeights
from relight.events.ids import DecisionId, EngineName, NodeName, SyncId
from relight.events.schema import EngineState, Meta, OpenSync, Snapshot
from relight.events.schema import Route as StateRoute
from relight.events.values import Member, Phase
from relight.events.version import Version

V1, V2 = Version(7, 1), Version(7, 2)
E0, E1 = EngineName("e0"), EngineName("e1")
COMMON: dict[str, Any] = {"id": DecisionId("5-1"), "reason": "test"}


def added(
    engine: EngineName, incarnation: int, address: str = "", *, version: Version = V1, epoch: int = 5
) -> RouteAdded:
    return RouteAdded(
        engine=engine,
        incarnation=incarnation,
        address=address or f"http://{engine}-{incarnation}",
        version=version,
        epoch=epoch,
        **COMMON,
    )


def fenced(engine: EngineName, incarnation: int, *, drain_s: float = 0.0, epoch: int = 5) -> RouteFenced:
    return RouteFenced(engine=engine, incarnation=incarnation, drain_s=drain_s, epoch=epoch, **COMMON)


def sync(*members: Key) -> SyncWeights:
    return SyncWeights(
        sync=SyncId("s1"),
        run=7,
        boundary=1,
        version=V2,
        members=tuple(Member(key.engine, key.incarnation, "http://x") for key in members),
        deadline=0,
        epoch=5,
        **COMMON,
    )


def load(engine: EngineName, incarnation: int) -> LoadWeights:
    return LoadWeights(
        engine=engine,
        incarnation=incarnation,
        version=V2,
        uri="/w",
        digest="sha256:0",
        deadline=0,
        epoch=5,
        **COMMON,
    )


def state(
    *routes: tuple[EngineName, int, Version], epoch: int = 5, bus: str = "here", sync: OpenSync | None = None
) -> Snapshot:
    return Snapshot(
        epoch=epoch,
        meta=Meta(birth="b", bus=bus, sync=sync),
        engines={
            engine: EngineState(
                phase=Phase.SERVING,
                node=NodeName("a"),
                incarnation=incarnation,
                route=StateRoute(address=f"http://{engine}-{incarnation}", version=version),
            )
            for engine, incarnation, version in routes
        },
    )


def told(*decisions: AnyDecision) -> Routes:
    routes = Routes()
    for decision in decisions:
        routes.apply(decision)
    return routes


def keys(routes: Routes) -> list[tuple[str, int]]:
    return sorted(route.key for route in routes)


@pytest.mark.parametrize(
    ("decisions", "left"),
    [
        pytest.param([added(E0, 1)], [(E0, 1)], id="added"),
        pytest.param([added(E0, 1), added(E0, 1)], [(E0, 1)], id="added twice"),
        pytest.param([added(E0, 1), fenced(E0, 1)], [], id="fenced"),
        pytest.param([added(E0, 1), fenced(E0, 1), fenced(E0, 1)], [], id="fenced twice"),
        pytest.param([added(E0, 2), fenced(E0, 1)], [(E0, 2)], id="a late fence of the older one"),
        pytest.param([added(E0, 1, "u"), added(E0, 2, "u")], [(E0, 2)], id="two lives, one address"),
        pytest.param([added(E0, 1, "u"), added(E1, 1, "u")], [(E1, 1)], id="two engines, one address"),
        pytest.param([added(E0, 2), added(E0, 1)], [(E0, 2)], id="an older one comes late"),
        pytest.param([fenced(E0, 2), added(E0, 1)], [], id="a newer one was fenced already"),
        pytest.param([added(E0, 1), fenced(E0, 2)], [], id="the fence of a newer one that was missed"),
        pytest.param([added(E0, 1), fenced(E1, 1)], [(E0, 1)], id="another engine's fence"),
        pytest.param([added(E0, 1, epoch=6), fenced(E0, 1, epoch=5)], [(E0, 1)], id="a lost epoch's fence"),
        pytest.param([fenced(E1, 1, epoch=6), added(E0, 1, epoch=5)], [], id="a lost epoch's route"),
        pytest.param([added(E0, 1), fenced(E0, 1), added(E0, 1)], [(E0, 1)], id="routed again"),
    ],
)
def test_decisions_lead_to_routes(decisions: list[AnyDecision], left: list[tuple[str, int]]) -> None:
    assert keys(told(*decisions)) == left


def test_what_is_only_a_dry_run_changes_nothing() -> None:
    routes = told(added(E0, 1))
    dry = RouteFenced(engine=E0, incarnation=1, epoch=5, dry_run=True, **COMMON)
    assert routes.apply(dry) == []
    assert keys(routes) == [(E0, 1)]


def test_one_entry_however_often_it_is_added_and_picks_are_not_doubled() -> None:
    routes = told(added(E0, 1, "u"), added(E0, 2, "u"), added(E0, 2, "u"), added(E1, 1))
    picked = [taken(routes).key for _ in range(1000)]
    assert picked.count(Key(E0, 2)) == picked.count(Key(E1, 1)) == 500


def taken(routes: Routes, **how: Any) -> Route:
    route = routes.pick(Wanted(**how))
    assert route is not None
    return route


def test_a_late_release_cannot_touch_a_replacement() -> None:
    routes = told(added(E0, 1))
    old = taken(routes)
    routes.apply(added(E0, 2))
    new = taken(routes)
    routes.release(old)
    assert (old.in_flight, new.in_flight) == (0, 1)


def test_the_least_busy_route_is_taken_and_equals_in_turn() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    busy = taken(routes)
    other = taken(routes)
    assert {busy.key, other.key} == {Key(E0, 1), Key(E1, 1)}
    routes.release(other)
    assert taken(routes) is other
    routes.release(other)
    routes.release(busy)
    in_turn = []
    for _ in range(4):
        route = taken(routes)
        in_turn.append(route.key.engine)
        routes.release(route)
    assert in_turn.count(E0) == 2


def test_a_session_stays_until_its_incarnation_is_gone() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    first = taken(routes, session="s")
    assert all(taken(routes, session="s") is first for _ in range(5))
    routes.apply(fenced(first.key.engine, 1))
    second = taken(routes, session="s")
    assert second is not first
    routes.apply(added(first.key.engine, 2))
    assert taken(routes, session="s") is second


def test_the_engine_that_failed_is_avoided_only_while_there_is_another() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    assert {taken(routes, avoid=Key(E0, 1)).key.engine for _ in range(10)} == {E1}
    routes.apply(fenced(E1, 1))
    assert taken(routes, avoid=Key(E0, 1)).key.engine == E0


def test_a_later_life_of_the_engine_that_failed_is_taken_where_the_others_are_full() -> None:
    routes = told(added(E0, 2), added(E1, 1))
    again = {"avoid": Key(E0, 1), "replays": True}
    assert [taken(routes, **again).key for _ in range(REPLAYS_AT_ONCE)] == [Key(E1, 1)] * REPLAYS_AT_ONCE
    assert taken(routes, **again).key == Key(E0, 2)


def test_the_very_incarnation_that_failed_is_waited_past_while_another_one_is_only_full() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    for _ in range(REPLAYS_AT_ONCE):
        taken(routes, avoid=Key(E0, 1), replays=True)
    assert routes.pick(Wanted(avoid=Key(E0, 1), replays=True)) is None


def test_replays_on_their_way_to_a_first_token_are_bounded_at_each_route_and_first_calls_are_not() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    picked = [taken(routes, replays=True) for _ in range(2 * REPLAYS_AT_ONCE)]
    assert sorted(route.boarding for route in routes) == [REPLAYS_AT_ONCE] * 2
    assert routes.pick(Wanted(replays=True)) is None
    assert not routes.roomy(replays=True)
    assert routes.pick(Wanted()) is not None
    routes.release(picked[0], Wanted(replays=True), boarding=True)
    assert taken(routes, replays=True) is picked[0]


def test_a_suspect_takes_an_idle_route_and_has_it_for_itself_while_there_is_a_choice() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    busy = taken(routes)
    alone = taken(routes, suspect=True)
    assert alone is not busy
    assert {taken(routes).key for _ in range(10)} == {busy.key}
    routes.apply(fenced(busy.key.engine, 1))
    assert taken(routes) is alone
    routes.release(alone, Wanted(suspect=True))
    assert not alone.quarantined


def test_a_session_leaves_its_route_to_a_suspect() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    own = taken(routes, session="s")
    routes.release(own)
    busy = next(route for route in routes if route is not own)
    busy.in_flight += 1
    assert taken(routes, suspect=True) is own
    assert taken(routes, session="s") is busy


def test_a_suspected_route_is_passed_over_until_a_decision_names_it() -> None:
    routes = told(added(E0, 1))
    route = taken(routes)
    assert routes.suspect(route)
    assert not routes.suspect(route)
    assert routes.pick() is None
    assert not routes.other_than(Key(E1, 1))
    routes.apply(added(E0, 1))
    assert taken(routes) is route


def test_a_route_that_is_well_and_not_reached_from_here_is_passed_over_until_it_is_another_one() -> None:
    routes = told(added(E0, 1))
    route = taken(routes)
    for _ in range(2):
        assert routes.suspect(route)
        routes.apply(added(E0, 1))
    assert routes.pick() is None
    routes.apply(added(E0, 1, version=V2))
    assert taken(routes) is route
    assert routes.suspect(route)
    routes.apply(added(E0, 2))
    assert taken(routes).key == Key(E0, 2)


def test_a_fence_frees_at_once_or_after_its_drain_and_a_route_that_returns_is_spared() -> None:
    routes = told(added(E0, 1))
    route = taken(routes)
    assert routes.apply(fenced(E0, 1, drain_s=60)) == [Freed(route, 60, "test")]
    assert routes.pick() is None
    assert routes.apply(added(E0, 1)) == [Spared(route)]
    assert taken(routes) is route
    routes.apply(fenced(E0, 1, drain_s=60))
    assert routes.apply(fenced(E0, 1)) == [Freed(route, 0, "test")]
    assert routes.apply(fenced(E0, 1)) == []


@pytest.mark.parametrize("drain_s", [0.0, 60.0])
def test_a_fence_says_whether_something_has_died(drain_s: float) -> None:
    routes = told(added(E0, 1))
    route = taken(routes)
    decision = msgspec.structs.replace(fenced(E0, 1, drain_s=drain_s), planned=True)
    assert routes.apply(decision) == [Freed(route, drain_s, "test", planned=True)]


def test_a_drained_route_that_was_forgotten_is_a_new_one_when_it_returns() -> None:
    routes = told(added(E0, 1))
    route = taken(routes)
    routes.apply(fenced(E0, 1, drain_s=1))
    routes.forget(route)
    assert routes.apply(added(E0, 1)) == []
    assert taken(routes) is not route


@pytest.mark.parametrize(
    ("between", "moved"),
    [
        pytest.param([], False, id="nothing"),
        pytest.param([sync(Key(E0, 1))], True, id="a sync names it"),
        pytest.param([load(E0, 1)], True, id="a load names it"),
        pytest.param([sync(Key(E0, 2), Key(E1, 1))], False, id="a sync names others"),
        pytest.param([added(E0, 1, version=V2)], True, id="its version moved"),
        pytest.param([added(E0, 1)], False, id="it is told again"),
        pytest.param([sync(Key(E0, 1)), added(E0, 1, version=V2)], True, id="a sync came and went"),
        pytest.param([fenced(E0, 1, drain_s=9), sync(Key(E0, 1))], True, id="synced while it drains"),
    ],
)
def test_whatever_may_have_changed_weights_counts(between: list[AnyDecision], moved: bool) -> None:
    routes = told(added(E0, 1))
    route = taken(routes)
    before = route.moves
    for decision in between:
        routes.apply(decision)
    assert (route.moving or route.moves != before) is moved


def test_a_route_is_certain_again_once_its_sync_is_over() -> None:
    routes = told(added(E0, 1), sync(Key(E0, 1)))
    assert taken(routes).moving
    routes.apply(added(E0, 1, version=V2))
    assert not taken(routes).moving


def test_a_standing_route_whose_version_moves_says_so_and_one_that_is_told_again_does_not() -> None:
    routes = told(added(E0, 1))
    route = taken(routes)
    assert routes.apply(added(E0, 1)) == []
    assert routes.apply(added(E0, 1, version=V2)) == [Moved(route, V2)]
    assert routes.read(state((E0, 1, V1)), stamp="here") == [Moved(route, V1)]


# --- waiting -------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_whoever_waits_is_given_a_route_in_turn_and_nobody_more_than_there_is_room_for() -> None:
    routes = Routes()
    queue = Queue(routes)
    served: list[int] = []

    async def wait(number: int) -> None:
        await queue.take(Wanted(replays=True))
        served.append(number)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number in range(REPLAYS_AT_ONCE + 2):
                tasks.start_soon(wait, number)
            await until(lambda: len(queue) == REPLAYS_AT_ONCE + 2)
            routes.apply(added(E0, 1))
            queue.serve()
            await until(lambda: len(served) == REPLAYS_AT_ONCE)
            assert len(queue) == 2
            (route,) = routes
            for _ in range(2):
                routes.release(route, Wanted(replays=True), boarding=True)
                queue.serve()
    assert served == list(range(REPLAYS_AT_ONCE + 2))


async def until(there: Callable[[], bool]) -> None:
    while not there():
        await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_a_first_call_does_not_wait_behind_replays_that_find_no_room() -> None:
    routes = Routes()
    queue = Queue(routes)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(REPLAYS_AT_ONCE + 1):
                tasks.start_soon(queue.take, Wanted(replays=True))
            await until(lambda: len(queue) == REPLAYS_AT_ONCE + 1)
            tasks.start_soon(queue.take, Wanted())
            await until(lambda: len(queue) == REPLAYS_AT_ONCE + 2)
            routes.apply(added(E0, 1))
            queue.serve()
            await until(lambda: len(queue) == 1)
            tasks.cancel_scope.cancel()
    (route,) = routes
    assert (route.in_flight, route.boarding) == (REPLAYS_AT_ONCE + 1, REPLAYS_AT_ONCE)


@pytest.mark.anyio
async def test_a_route_that_is_fenced_before_its_taker_runs_is_not_taken() -> None:
    routes = Routes()
    queue = Queue(routes)
    given: list[Route] = []

    async def wait() -> None:
        given.append(await queue.take(Wanted()))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: len(queue) == 1)
            for decision in (added(E0, 1), fenced(E0, 1)):
                routes.apply(decision)
                queue.serve()
            await until(lambda: len(queue) == 1)
            routes.apply(added(E0, 2))
            queue.serve()
    assert [route.key for route in given] == [Key(E0, 2)]


@pytest.mark.anyio
async def test_a_caller_that_goes_as_it_is_served_gives_its_route_back() -> None:
    routes = Routes()
    queue = Queue(routes)
    with anyio.fail_after(10):
        waiting = asyncio.create_task(queue.take(Wanted(replays=True)))
        await until(lambda: len(queue) == 1)
        routes.apply(added(E0, 1))
        queue.serve()
        waiting.cancel()
        await asyncio.wait([waiting])
    (route,) = routes
    assert waiting.cancelled()
    assert (route.in_flight, route.boarding) == (0, 0)


# --- the state ----------------------------------------------------------------------------------------


def test_a_client_that_missed_every_event_converges_on_the_state() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    gone = next(route for route in routes if route.key.engine == E0)
    changes = routes.read(state((E0, 2, V1), (E1, 1, V1)), stamp="here")
    assert changes == [Freed(gone, 0.0, "the state routes it no more")]
    assert keys(routes) == [(E0, 2), (E1, 1)]


def test_a_state_of_another_server_is_void_to_a_fresh_reader_and_leaves_held_routes_alone() -> None:
    fresh = Routes()
    assert fresh.read(state((E0, 1, V1), bus="there"), stamp="here") == []
    assert keys(fresh) == []
    held = told(added(E1, 1))
    before = taken(held).moves
    for nothing in (state((E0, 1, V1), bus="there"), state((E0, 1, V1), epoch=4), Snapshot()):
        assert held.read(nothing, stamp="here") == []
        assert keys(held) == [(E1, 1)]
    assert taken(held).moves > before
    assert taken(held).moving
    held.apply(added(E1, 1))
    assert not taken(held).moving


def test_reading_the_state_makes_sure_of_routes_whose_version_stands() -> None:
    routes = told(added(E0, 1), added(E1, 1))
    before = {route.key.engine: route.moves for route in routes}
    routes.lose("away")
    assert routes.blind == "away"
    routes.read(state((E0, 1, V1), (E1, 1, V2)), stamp="here")
    assert routes.blind is None
    moved = {route.key.engine: route.moves != before[route.key.engine] for route in routes}
    assert moved == {E0: False, E1: True}


def test_a_route_that_the_state_has_no_more_is_uncertain_to_whoever_samples_there() -> None:
    routes = told(added(E0, 1))
    held = taken(routes)
    before = held.moves
    routes.lose("away")
    routes.read(state((E1, 1, V2)), stamp="here")
    assert held.moves > before


def test_a_sync_that_is_open_in_the_state_makes_its_members_uncertain() -> None:
    routes = Routes()
    open_sync = OpenSync(order=sync(Key(E0, 1)), pending=(E0,))
    routes.read(state((E0, 1, V1), (E1, 1, V1), sync=open_sync), stamp="here")
    assert {route.key.engine: route.moving for route in routes} == {E0: True, E1: False}
