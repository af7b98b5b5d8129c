"""Agent loops: turns of one session, groups of samples, turns that the caller aborts, and their numbers."""

from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from aiohttp import web

from relight.agents.replay.client import ReplayClient
from relight.agents.replay.params import derived_seed
from relight.agents.replay.turn import End, ReplayTimeout, Span, Turn
from relight.events.bus.embedded import Embedded
from relight.events.errors import UsageError
from tests.replay_job import E0, E1, V2, orchestrator
from tests.replay_rig import (
    PROMPT,
    Asked,
    Fleet,
    World,
    ends,
    fleet,
    heard,
    params,
    rest,
    says,
    scripted,
    served,
    serves,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet"), engines=2) as ready:
        yield ready


@pytest.fixture
async def world(server: Embedded, engines: Fleet) -> AsyncIterator[World]:
    async with orchestrator(server.url) as mind:
        yield World(server, mind, engines.ready())


async def test_turns_of_a_session_stay_on_one_engine_through_tool_calls_and_a_death_moves_them(
    world: World,
) -> None:
    """Each turn's prompt is all that was said before it, as an agent's is."""
    for engine, stub in zip((E0, E1), world.stubs, strict=True):
        await world.mind.route(engine, 1, stub.port)
    said = list(PROMPT)
    async with world.client() as client:
        while len(client.addresses) < 2:
            await anyio.sleep(0.01)
        homes: list[str] = []
        for number in range(6):
            turn = await client.generate(said, params(10), session="agent-1")
            assert turn.token_ids == world.fleet.reference(10, said)[0]
            homes.append(turn.attempts[-1].engine)
            said += [*turn.token_ids, 400 + number]  # the tool's answer
            if number == 2:
                home = homes[0]
                await world.mind.fence(E0 if home == E0 else E1, 1)
                while len(client.addresses) == 2:
                    await anyio.sleep(0.01)
    assert homes[:3] == [homes[0]] * 3
    assert homes[3:] == [E1 if homes[0] == E0 else E0] * 3


async def test_what_goes_with_a_call_goes_with_each_of_its_attempts(world: World) -> None:
    cut = 7

    async def dies_once(request: web.Request, asked: Asked) -> web.StreamResponse:
        if len(first.asked) > 1:
            return await serves(world.fleet.digest)(request, asked)
        return await says(b"".join(islice(served(world.fleet.digest, asked), cut)))(request, asked)

    first_params = params(20, seed=11, temperature=0.0)
    async with scripted(dies_once) as first, world.client() as client:
        await world.mind.route(E0, 1, first.port)
        async with client.stream(
            PROMPT,
            first_params,
            session="agent-1",
            headers={"X-Request-Id": "mine", "Authorization": "Bearer key"},
            extra={"cache_salt": "salt", "priority": 3},
        ) as pieces:
            await heard(pieces, cut)
            async with anyio.create_task_group() as tasks:

                async def route_the_next_life() -> None:
                    await world.mind.suspicion()
                    await world.mind.route(E0, 2, first.port)

                tasks.start_soon(route_the_next_life)
                turn = await rest(pieces)
    world.assert_reference(turn, 20)
    one, two = first.asked
    for number, asked in enumerate((one, two)):
        assert asked.headers["X-Request-Id"] == asked.body["request_id"] == f"mine-{number}"
        assert asked.headers["X-Session-ID"] == "agent-1"
        assert asked.headers["Authorization"] == "Bearer key"
        assert (asked.body["cache_salt"], asked.body["priority"]) == ("salt", 3)
        assert asked.body["stream"] is True
    assert one.body["sampling_params"] == first_params
    assert two.body["token_ids"] == [*PROMPT, *turn.token_ids[:cut]]
    assert two.body["sampling_params"] == {
        **first_params,
        "max_tokens": 20 - cut,
        "seed": derived_seed(11, 1),
    }


# --- groups --------------------------------------------------------------------------------------------


async def test_samples_of_a_group_are_turns_of_their_own_with_seeds_of_their_own(world: World) -> None:
    async with scripted(serves(world.fleet.digest)) as engine, world.client() as client:
        await world.mind.route(E0, 1, engine.port)
        given = params(8, seed=5, n=4)
        outcomes = await client.group(PROMPT, given, n=4, headers={"X-Request-Id": "group"})
    assert given == params(8, seed=5, n=4)
    turns = [outcome for outcome in outcomes if isinstance(outcome, Turn)]
    assert [turn.request_id for turn in turns] == [f"group-{number}" for number in range(4)]
    by_id = {asked.body["request_id"]: asked for asked in engine.asked}
    asked = [by_id[f"group-{number}-0"].body["sampling_params"] for number in range(4)]
    assert [each["seed"] for each in asked] == [5, 6, 7, 8]
    assert {each["n"] for each in asked} == {1}
    assert len({each.headers["X-Session-ID"] for each in engine.asked}) == 1


async def test_a_group_keeps_what_each_of_its_samples_has_when_its_engine_dies(world: World) -> None:
    world.stubs[0].knobs(stream_fault="eof", stream_fault_after=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client, anyio.create_task_group() as tasks:

        async def route_another() -> None:
            await world.mind.suspicion()
            await world.mind.route(E1, 1, world.stubs[1].port)

        tasks.start_soon(route_another)
        outcomes = await client.group(PROMPT, params(), n=4)
    for outcome in outcomes:
        assert isinstance(outcome, Turn)
        world.assert_reference(outcome)
        assert [attempt.kept for attempt in outcome.attempts] == [0, 40]


async def test_a_sample_of_a_group_that_fails_leaves_the_others_alone(world: World) -> None:
    world.stubs[0].knobs(stream_fault="hang", stream_fault_after=5, stream_fault_times=1)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client:
        outcomes = await client.group(PROMPT, params(), n=3, timeout_s=2.0)
    failed = [outcome for outcome in outcomes if isinstance(outcome, ReplayTimeout)]
    assert [len(error.partial.token_ids) for error in failed] == [5]
    for outcome in outcomes:
        if isinstance(outcome, Turn):
            world.assert_reference(outcome)


# --- aborts --------------------------------------------------------------------------------------------


async def test_a_turn_that_its_caller_aborts_returns_what_it_has_with_versions(world: World) -> None:
    world.stubs[0].knobs(stream_fault="hang", stream_fault_after=30)
    await world.mind.route(E0, 1, world.stubs[0].port)
    turns: list[Turn] = []
    async with world.client() as client:

        async def generate(name: str) -> None:
            turns.append(await client.generate(PROMPT, params(), headers={"X-Request-Id": name}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, "one")
            async with client.stream(PROMPT, params()) as pieces:
                await heard(pieces, 30)
                assert client.abort("no such turn") == 0
                assert client.abort("one") == 1
                tasks.start_soon(generate, "two")
                while not turns:
                    await anyio.sleep(0.01)
                (one,) = turns
                assert client.abort() == 2
                streamed = await rest(pieces)
    ids, logprobs = world.fleet.reference(30)
    assert (streamed.token_ids, streamed.logprobs, streamed.versions) == (
        ids,
        logprobs,
        (Span("7.1", 0, 30),),
    )
    for turn in (streamed, one, *turns):
        assert not turn.complete
        assert turn.token_ids == ids[: len(turn.token_ids)]
        assert ends(turn) == [(E0, End.CANCELLED)]
    while world.stubs[0].get("/load").body["server_load"] != 0:
        await anyio.sleep(0.01)


async def test_a_turn_that_waits_for_a_route_can_be_aborted_too(world: World) -> None:
    async with world.client() as client, anyio.create_task_group() as tasks:
        turns: list[Turn] = []

        async def generate() -> None:
            turns.append(await client.generate(PROMPT, params()))

        tasks.start_soon(generate)
        while client.abort() == 0:
            await anyio.lowlevel.checkpoint()
        while not turns:
            await anyio.sleep(0.01)
    assert (turns[0].token_ids, turns[0].attempts, turns[0].complete) == ([], (), False)


# --- numbers -------------------------------------------------------------------------------------------


async def test_a_client_counts_what_replays_cost_and_did(world: World) -> None:
    world.stubs[0].knobs(stream_fault="eof", stream_fault_after=40)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client:
        async with client.stream(PROMPT, params()) as pieces:
            await heard(pieces, 40)
            await world.mind.route(E1, 1, world.stubs[1].port, version=V2)
            world.stubs[1].post("/update_weight_version", {"new_version": "7.2"})
            await rest(pieces)
        await world.mind.fence(E0, 1)
        await client.generate(PROMPT, params(60))
        with pytest.raises(ReplayTimeout):
            await client.generate(PROMPT, params(400), timeout_s=0.05)
        told = client.numbers(step=3)
        again = client.numbers(step=4)
        text = client.metrics()
    assert told["step"] == 3
    assert (told["turns"], told["turns_complete"], told["turns_timed_out"]) == (3, 2, 1)
    assert (told["tokens_kept"], told["tokens_regenerated"]) == (40, 0)
    assert (told["replays_by_reason"], told["replays_by_way"]) == ({"eof": 1}, {"continued": 1})
    assert told["mixed_version_share"] == 0.5
    assert (told["length_interrupted"]["mean"], told["length_uninterrupted"]["mean"]) == (100, 60)
    assert told["gap_s"]["count"] == 1
    assert (again["step"], again["turns"]) == (4, 0)
    assert 'relight_replay_replays_total{reason="eof",way="continued"} 1\n' in text


@pytest.mark.parametrize("wrong", [-0.1, float("nan")])
def test_a_limit_of_the_seam_that_is_none_is_refused(wrong: float) -> None:
    options: dict[str, Any] = {"check_seam": wrong}
    with pytest.raises(UsageError, match="check_seam"):
        ReplayClient("redis://x", job="job", **options)
