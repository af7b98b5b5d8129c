"""Whole turns against stub engines and a real bus: whatever dies, the tokens are those of the reference."""

import copy
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from relight.agents.replay import client as client_module
from relight.agents.replay.client import Pieces, ReplayClient
from relight.agents.replay.turn import (
    End,
    PoisonRequestError,
    ReplayError,
    ReplayTimeout,
    RequestRejected,
    Span,
    Turn,
)
from relight.agents.stub.launch import Stub
from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.embedded import Embedded
from relight.events.errors import BusUnavailable, UsageError
from tests.replay_job import E0, E1, E2, JOB, V2, Orchestrator, orchestrator
from tests.replay_rig import Fleet, fleet, label

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]
WITHIN_S = 30.0


class World(NamedTuple):
    """A bus, an orchestrator's voice on it, and two engines of the same weights, labelled 7.1."""

    server: Embedded
    mind: Orchestrator
    stubs: list[Stub]
    model: Path

    def client(self, **options: Any) -> ReplayClient:
        return ReplayClient(self.server.url, job=JOB, **options)

    def assert_reference(self, turn: Turn, length: int = 100) -> None:
        ids, logprobs = reference(weights_digest(self.model), PROMPT, length)
        assert turn.token_ids == ids
        assert turn.logprobs == logprobs
        assert turn.finish_reason == "length"
        assert turn.complete


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet"), engines=2) as started:
        yield started


@pytest.fixture
async def world(server: Embedded, engines: Fleet) -> AsyncIterator[World]:
    async with orchestrator(server.url) as mind:
        yield World(server, mind, engines.ready().stubs, engines.model)


def params(max_tokens: int = 100, **changes: Any) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0, **changes}


async def heard(pieces: Pieces, tokens: int) -> None:
    """Read until so many tokens of the turn are there."""
    async for piece in pieces:
        if piece.start + len(piece.token_ids) >= tokens:
            return


async def rest(pieces: Pieces) -> Turn:
    """Read to the end."""
    with anyio.fail_after(WITHIN_S):
        async for _ in pieces:
            pass
    return pieces.turn


def ends(turn: Turn) -> list[tuple[str, End]]:
    return [(attempt.engine, attempt.reason) for attempt in turn.attempts]


async def test_an_undisturbed_turn_is_one_attempt(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client:
        turn = await client.generate(PROMPT, params())
    world.assert_reference(turn)
    assert turn.versions == (Span("7.1", 0, 100),)
    (attempt,) = turn.attempts
    assert (attempt.engine, attempt.incarnation, attempt.kept, attempt.sent) == (E0, 1, 0, 3)
    assert (attempt.made, attempt.reason, attempt.max_tokens) == (100, End.COMPLETE, 100)
    assert attempt.request_id == f"{turn.request_id}-0"


# --- deaths, in both modes --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["continue", "restart"])
async def test_a_killed_core_costs_no_token_and_doubles_none(world: World, mode: str) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(mode=mode) as client, client.stream(PROMPT, params()) as pieces:
        received: list[int] = []
        killed = False
        async for piece in pieces:
            del received[piece.start :]
            received += piece.token_ids
            if len(received) >= 40 and not killed:
                killed = True
                os.kill(world.stubs[0].core, signal.SIGKILL)
                await world.mind.route(E1, 1, world.stubs[1].port)
        turn = pieces.turn
    world.assert_reference(turn)
    assert received == turn.token_ids
    first, second = turn.attempts
    assert (first.engine, second.engine) == (E0, E1)
    assert first.reason in (End.ERROR_FRAME, End.RESET)
    assert second.kept == (first.made if mode == "continue" else 0)
    assert second.max_tokens == 100 - second.kept
    assert second.sent == len(PROMPT) + second.kept
    assert second.restarted == (None if mode == "continue" else "mode restart")
    assert turn.versions == (Span("7.1", 0, 100),)


async def test_a_killed_server_costs_no_token_and_doubles_none(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 40)
        world.stubs[0].process.kill()
        await world.mind.route(E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn) == [(E0, End.RESET), (E1, End.COMPLETE)]
    assert turn.attempts[1].kept >= 40


async def test_a_death_with_no_survivor_is_hinted_at_and_waited_out(world: World) -> None:
    world.stubs[0].knobs(exit_after_tokens=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    turns: list[Turn] = []
    async with world.client() as client:

        async def generate() -> None:
            turns.append(await client.generate(PROMPT, params()))

        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate)
                hint = await world.mind.suspicion()
                assert (hint.engine, hint.incarnation) == (E0, 1)
                assert client.addresses == []
                await world.mind.fence(E0, 1)
                await world.mind.route(E0, 2, world.stubs[1].port)
    world.assert_reference(turns[0])
    assert [attempt.incarnation for attempt in turns[0].attempts] == [1, 2]
    assert turns[0].attempts[1].kept == 40


# --- the ways a stream breaks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("error", {End.ERROR_FRAME}),
        ("error_done", {End.ERROR_FRAME}),
        ("eof", {End.EOF}),
        ("cut", {End.RESET}),
        ("abort", {End.ABORTED}),
        ("empty", {End.EOF}),
    ],
)
async def test_each_way_a_stream_breaks_is_told_apart_and_replayed(
    world: World, fault: str, reasons: set[End]
) -> None:
    world.stubs[0].knobs(stream_fault=fault, stream_fault_after=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with (
        world.client() as client,
        client.stream(PROMPT, params()) as pieces,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(world.mind.route, E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    first, last = turn.attempts[0], turn.attempts[-1]
    assert (first.engine, last.engine) == (E0, E1)
    assert first.reason in reasons
    # A reset overtakes what lies unread in the socket; nothing else loses a token.
    assert last.kept == {"empty": 0, "cut": last.kept}.get(fault, 40)


@pytest.mark.parametrize(
    ("knobs", "reason", "kept"),
    [
        pytest.param({"short_logprobs": True}, End.MALFORMED, 0, id="a logprob is missing"),
        pytest.param({"drop_token": 30}, End.MALFORMED, 0, id="a token is missing"),
        pytest.param({"generate_status": 500}, End.SERVER_ERROR, 0, id="status 500"),
        pytest.param({"generate_status": 503}, End.SERVER_ERROR, 0, id="status 503"),
        pytest.param({"generate_status": 429}, End.OVERLOADED, 0, id="status 429"),
        pytest.param(
            {"generate_status": 503, "retry_after_s": 1}, End.OVERLOADED, 0, id="status 503, Retry-After"
        ),
        pytest.param({"lying_version": "7.0"}, End.MALFORMED, 0, id="older weights than the route says"),
    ],
)
async def test_what_cannot_be_trusted_is_replayed_elsewhere_and_never_padded(
    world: World, knobs: dict[str, Any], reason: End, kept: int
) -> None:
    world.stubs[0].knobs(**knobs)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with (
        world.client() as client,
        client.stream(PROMPT, params()) as pieces,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(world.mind.route, E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn)[0] == (E0, reason)
    assert ends(turn)[-1] == (E1, End.COMPLETE)
    assert turn.attempts[-1].kept == kept


async def test_a_refused_connection_is_no_failure_of_the_turn(world: World, free_port: int) -> None:
    for engine in (E0, E2):
        await world.mind.route(engine, 1, free_port)
    async with (
        world.client(max_engine_failures=1) as client,
        client.stream(PROMPT, params()) as pieces,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(world.mind.route, E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert {reason for engine, reason in ends(turn) if engine != E1} == {End.REFUSED}


async def test_a_busy_engine_is_waited_for_and_not_given_up(world: World) -> None:
    stub = world.stubs[0]
    stub.knobs(generate_status=503, retry_after_s=0)
    await world.mind.route(E0, 1, stub.port)
    async with (
        world.client(max_engine_failures=1) as client,
        client.stream(PROMPT, params()) as pieces,
        anyio.create_task_group() as tasks,
    ):

        async def relent() -> None:
            while not pieces.turn.attempts:
                await anyio.lowlevel.checkpoint()
            await anyio.to_thread.run_sync(lambda: stub.knobs(generate_status=0))

        tasks.start_soon(relent)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert {reason for _, reason in ends(turn)[:-1]} == {End.OVERLOADED}


# --- no byte and no FIN --------------------------------------------------------------------------------


async def test_a_fence_frees_all_callers_of_a_frozen_engine_at_once(world: World) -> None:
    world.stubs[0].knobs(freeze_after_tokens=8 * 20)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(idle_timeout_s=None) as client:
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                turns = await eight(client, tasks, tokens=10)
                await world.mind.fence(E0, 1)
                await world.mind.route(E1, 1, world.stubs[1].port)
    assert len(turns) == 8
    for turn in turns:
        world.assert_reference(turn)
        assert ends(turn) == [(E0, End.FENCED), (E1, End.COMPLETE)]
        assert turn.attempts[1].kept >= 10


async def eight(client: ReplayClient, tasks: Any, *, tokens: int) -> list[Turn]:
    """Start eight turns; return when each has so many tokens. Turns join the list as they end."""
    turns: list[Turn] = []
    started = [anyio.Event() for _ in range(8)]

    async def generate(ready: anyio.Event) -> None:
        async with client.stream(PROMPT, params()) as pieces:
            await heard(pieces, tokens)
            ready.set()
            turns.append(await rest(pieces))

    for ready in started:
        tasks.start_soon(generate, ready)
    for ready in started:
        await ready.wait()
    return turns


async def test_a_fence_frees_a_caller_whose_engine_never_answered_at_all(world: World) -> None:
    world.stubs[0].knobs(stream_fault="silent")
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with (
        world.client(idle_timeout_s=None) as client,
        client.stream(PROMPT, params()) as pieces,
        anyio.create_task_group() as tasks,
    ):

        async def fence() -> None:
            with anyio.fail_after(WITHIN_S):
                while world.stubs[0].get("/load").body["server_load"] == 0 and not asked(world.stubs[0]):
                    await anyio.lowlevel.checkpoint()
            await world.mind.fence(E0, 1)
            await world.mind.route(E1, 1, world.stubs[1].port)

        tasks.start_soon(fence)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn) == [(E0, End.FENCED), (E1, End.COMPLETE)]


def asked(stub: Stub) -> bool:
    return any("/inference/v1/generate" in line for line in stub.lines)


async def test_an_idle_engine_is_left_without_a_fence(world: World) -> None:
    world.stubs[0].knobs(stream_fault="hang", stream_fault_after=40)
    for engine, stub in zip((E0, E1), world.stubs, strict=True):
        await world.mind.route(engine, 1, stub.port)
    async with world.client(idle_timeout_s=0.5) as client:
        with anyio.fail_after(WITHIN_S):
            turns = [await client.generate(PROMPT, params()) for _ in range(2)]
    for turn in turns:
        world.assert_reference(turn)
    (broken,) = [turn for turn in turns if len(turn.attempts) == 2]
    assert ends(broken) == [(E0, End.IDLE), (E1, End.COMPLETE)]
    assert broken.attempts[1].kept == 40


async def test_a_draining_route_lets_running_calls_finish_and_takes_no_new_ones(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 10)
        await world.mind.fence(E0, 1, drain_s=60)
        await world.mind.route(E1, 1, world.stubs[1].port)
        assert (await client.generate(PROMPT, params(4))).attempts[0].engine == E1
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn) == [(E0, End.COMPLETE)]


async def test_a_draining_route_frees_its_calls_when_the_drain_time_is_over(world: World) -> None:
    world.stubs[0].knobs(stream_fault="hang", stream_fault_after=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(idle_timeout_s=None) as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 40)
        await world.mind.fence(E0, 1, drain_s=0.2)
        await world.mind.route(E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn) == [(E0, End.FENCED), (E1, End.COMPLETE)]


# --- what is asked for ---------------------------------------------------------------------------------


async def test_one_parameter_object_serves_many_turns_and_attempts_and_never_changes(world: World) -> None:
    given = params(64, min_tokens=50, stop_token_ids=[])
    before = copy.deepcopy(given)
    world.stubs[0].knobs(exit_after_tokens=2 * 40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    turns: list[Turn] = []
    async with world.client() as client:

        async def generate() -> None:
            turns.append(await client.generate(PROMPT, given))

        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate)
                tasks.start_soon(generate)
                await world.mind.suspicion()
                await world.mind.route(E1, 1, world.stubs[1].port)
    assert given == before
    for turn in turns:
        world.assert_reference(turn, 64)
        first, second = turn.attempts
        assert first.max_tokens == 64
        assert second.max_tokens == 64 - second.kept
        assert first.made + second.made == 64


async def test_a_turn_that_ended_though_the_finish_never_came_is_not_sent_again(world: World) -> None:
    ids, _ = reference(weights_digest(world.model), PROMPT, 100)
    stop = next(token for token in ids[20:] if token not in ids[:20])
    length = ids.index(stop) + 1
    world.stubs[0].knobs(stream_fault="error_done", stream_fault_after=length)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client:
        with anyio.fail_after(WITHIN_S):
            turn = await client.generate(PROMPT, params(stop_token_ids=[stop]))
    assert turn.token_ids == ids[:length]
    assert (turn.finish_reason, turn.stop_reason) == ("stop", stop)
    assert len(turn.attempts) == 1


async def test_extra_fields_headers_and_sessions_reach_the_engine(world: World) -> None:
    for engine, stub in zip((E0, E1), world.stubs, strict=True):
        await world.mind.route(engine, 1, stub.port)
    async with world.client() as client:
        turns = [
            await client.generate(
                PROMPT,
                params(2),
                session="agent-1",
                headers={"X-Request-Id": f"mine-{number}"},
                extra={"cache_salt": "salt", "priority": 0},
            )
            for number in range(4)
        ]
        with pytest.raises(RequestRejected) as rejected:
            await client.generate(PROMPT, params(2), extra={"model": "another"})
    assert len({turn.attempts[0].engine for turn in turns}) == 1
    assert [turn.request_id for turn in turns] == [f"mine-{number}" for number in range(4)]
    assert rejected.value.status == 404


async def test_without_logprobs_there_are_none_and_the_turn_is_continued(world: World) -> None:
    world.stubs[0].knobs(exit_after_tokens=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client, client.stream(PROMPT, params(logprobs=None)) as pieces:
        await heard(pieces, 30)
        await world.mind.route(E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    assert turn.token_ids == reference(weights_digest(world.model), PROMPT, 100)[0]
    assert turn.logprobs is None
    assert turn.attempts[1].kept == 40


# --- what passes through ---------------------------------------------------------------------------------


async def test_the_callers_own_fault_passes_through_at_once(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client:
        with pytest.raises(RequestRejected) as rejected:
            await client.generate(PROMPT, params(temperature=9.0))
        assert rejected.value.status == 400
        assert b"temperature" in rejected.value.body
        assert ends(rejected.value.partial) == [(E0, End.REJECTED)]
        assert len(client.addresses) == 1


async def test_a_timeout_ends_the_call_with_all_tokens_so_far(world: World) -> None:
    world.stubs[0].knobs(stream_fault="hang", stream_fault_after=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client:
        with pytest.raises(ReplayTimeout) as late:
            await client.generate(PROMPT, params(), timeout_s=1.0)
    ids, logprobs = reference(weights_digest(world.model), PROMPT, 40)
    assert late.value.partial.token_ids == ids
    assert late.value.partial.logprobs == logprobs
    assert late.value.partial.versions == (Span("7.1", 0, 40),)
    assert not late.value.partial.complete


async def test_a_recovery_that_never_comes_ends_the_call_with_all_tokens_so_far(world: World) -> None:
    world.stubs[0].knobs(exit_after_tokens=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(recovery_timeout_s=0.5) as client:
        with pytest.raises(ReplayTimeout, match="no route within") as late:
            await client.generate(PROMPT, params())
    assert len(late.value.partial.token_ids) == 40
    assert len(late.value.partial.attempts) == 1


async def test_a_turn_that_meets_a_third_death_is_called_poison(world: World) -> None:
    world.stubs[0].knobs(stream_fault="cut", stream_fault_after=5)
    async with (
        world.client() as client,
        client.stream(PROMPT, params()) as pieces,
        anyio.create_task_group() as tasks,
    ):

        async def route_each_new_life() -> None:
            for incarnation in (1, 2, 3):
                await world.mind.route(E0, incarnation, world.stubs[0].port)
                await world.mind.suspicion()

        tasks.start_soon(route_each_new_life)
        with pytest.raises(PoisonRequestError, match="3 engine failures") as poison:
            await rest(pieces)
    assert [attempt.reason for attempt in poison.value.partial.attempts] == [End.RESET] * 3
    assert isinstance(poison.value, ReplayError)


async def test_a_turn_whose_engines_are_taken_out_alive_is_never_called_poison(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client, client.stream(PROMPT, params()) as pieces:
        for incarnation in range(1, 6):
            await heard(pieces, 2)
            await world.mind.fence(E0, incarnation, planned=True)
            await world.mind.route(E0, incarnation + 1, world.stubs[0].port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn) == [*[(E0, End.WITHDRAWN)] * 5, (E0, End.COMPLETE)]


async def test_a_call_left_early_leaves_nothing_running_in_the_engine(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client:
        async with client.stream(PROMPT, params(400)) as pieces:
            await heard(pieces, 5)
        assert pieces.turn.attempts[0].reason == End.CANCELLED
        assert len(pieces.turn.token_ids) >= 5
        with anyio.fail_after(WITHIN_S):
            while True:
                async with client.http.get(f"{client.addresses[0]}/load") as response:
                    if (await response.json())["server_load"] == 0:
                        break


# --- versions ---------------------------------------------------------------------------------------------


async def test_tokens_of_a_sync_under_way_are_not_continued_unless_the_engine_told_their_version(
    world: World,
) -> None:
    world.stubs[0].knobs(exit_after_tokens=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 30)
        await world.mind.sync(E0, 1)
        await world.mind.route(E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert turn.attempts[1].kept == 0
    assert turn.attempts[1].restarted is not None
    assert "synced under way" in turn.attempts[1].restarted


@pytest.mark.parametrize("versions", ["mixed", "same"])
async def test_a_version_that_moves_between_attempts_is_recorded_or_replayed(
    world: World, versions: str
) -> None:
    world.stubs[0].knobs(exit_after_tokens=40)
    label(world.stubs[1], "7.2")
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(versions=versions) as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 30)
        await world.mind.route(E1, 1, world.stubs[1].port, version=V2)
        turn = await rest(pieces)
    world.assert_reference(turn)
    if versions == "mixed":
        assert turn.versions == (Span("7.1", 0, 40), Span("7.2", 40, 100))
    else:
        assert turn.versions == (Span("7.2", 0, 100),)
        assert turn.attempts[1].restarted == "version moved from 7.1 to 7.2"


# --- the bus ----------------------------------------------------------------------------------------------


async def test_a_call_that_starts_while_no_route_exists_waits_for_one(world: World) -> None:
    async with (
        world.client() as client,
        client.stream(PROMPT, params()) as pieces,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(world.mind.route, E0, 1, world.stubs[0].port)
        turn = await rest(pieces)
    world.assert_reference(turn)


async def test_without_the_bus_calls_go_on_with_the_routes_that_are_held(world: World) -> None:
    for engine, stub in zip((E0, E1), world.stubs, strict=True):
        await world.mind.route(engine, 1, stub.port)
    async with world.client() as client:
        world.server.stop()
        for _ in range(2):
            world.assert_reference(await client.generate(PROMPT, params()))
        world.stubs[0].process.kill()
        with anyio.fail_after(WITHIN_S):
            for _ in range(4):
                turn = await client.generate(PROMPT, params())
                world.assert_reference(turn)
                assert turn.attempts[-1].engine == E1


async def test_routes_of_a_state_that_another_server_made_are_void(world: World) -> None:
    world.mind.stamp = "another:server"
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(recovery_timeout_s=0.2) as client:
        assert client.addresses == []
        with pytest.raises(ReplayTimeout):
            await client.generate(PROMPT, params())


def test_wrong_arguments_are_refused_with_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIGHT_BUS_URL", raising=False)
    with pytest.raises(UsageError, match="continue, restart"):
        ReplayClient("redis://x", job="job", mode="again")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="RELIGHT_BUS_URL"):
        ReplayClient(job="job")
    with pytest.raises(UsageError, match="must match"):
        ReplayClient("redis://x", job="No Job")


async def test_routes_that_cannot_be_read_in_time_are_one_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SYNC_S", 0.05)
    monkeypatch.setattr(client_module.Dispatch, "synced", lambda _: anyio.sleep_forever())
    with pytest.raises(BusUnavailable, match=r"job job: its routes could not be read within 0\.05 s"):
        async with ReplayClient(world.server.url, job="job"):
            pass
