"""Failures that others reported of routing and of samples, each with a small input and the right end.

docs/failures.md says which test answers which report.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis.asyncio as redis
from aiohttp import web

from relight.agents.replay.limits import BACKOFF_S
from relight.agents.replay.picks import REPLAYS_AT_ONCE
from relight.agents.replay.turn import End, Span, Turn
from relight.events.bus.embedded import Embedded
from relight.events.ids import EngineName
from relight.events.version import Version
from tests.replay_job import E0, E1, E2, V1, V2, orchestrator
from tests.replay_rig import (
    PROMPT,
    WITHIN_S,
    Asked,
    Fleet,
    World,
    ends,
    event,
    fleet,
    heard,
    label,
    params,
    rest,
    says,
    scripted,
    serves,
)
from tests.slow_link import link_to

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = ("--max-num-seqs", "1000", "--max-model-len", "1000000")
    with fleet(tmp_path_factory.mktemp("fleet"), *flags, engines=3) as ready:
        yield ready


@pytest.fixture
async def world(server: Embedded, engines: Fleet) -> AsyncIterator[World]:
    async with orchestrator(server.url) as mind:
        yield World(server, mind, engines.ready())


# --- an answer that is none ---------------------------------------------------------------------------


V3 = Version(7, 3)
SCORED = {"content": [{"token_id": 9, "logprob": -1.0}]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", End.EOF, id="an empty body"),
        pytest.param(b"data: [DONE]\n\n", End.DONE_WITHOUT_FINISH, id="nothing but the end mark"),
        pytest.param(event(token_ids=[], finish_reason="stop"), End.MALFORMED, id="a finish without a token"),
        pytest.param(event(text="nine", finish_reason="stop"), End.MALFORMED, id="text without ids"),
        pytest.param(event(text="nine"), End.MALFORMED, id="a piece of text without ids"),
        pytest.param(event(token_ids=[9]), End.MALFORMED, id="ids without logprobs"),
        pytest.param(event(token_ids=[9, 8], logprobs=SCORED), End.MALFORMED, id="more ids than logprobs"),
        pytest.param(event(token_ids=[8], logprobs=SCORED), End.MALFORMED, id="another token's logprob"),
        pytest.param(event(token_ids="9"), End.MALFORMED, id="another type"),
        pytest.param(b"data: {]\n\n", End.MALFORMED, id="no JSON"),
        pytest.param(
            b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\ndata: [DONE]\n\n',
            End.ERROR_FRAME,
            id="an error and the end mark",
        ),
        pytest.param(
            event(token_ids=[], finish_reason="abort"), End.ABORTED, id="an abort that nobody asked for"
        ),
        pytest.param(event(token_ids=[], finish_reason="error"), End.ERROR_FINISH, id="finish reason error"),
    ],
)
async def test_a_200_without_a_whole_answer_is_replayed_and_never_padded(
    world: World, content: bytes, reason: End
) -> None:
    turn = await answered_first_by(content, world)
    world.assert_reference(turn)
    assert ends(turn)[0] == (E0, reason)
    assert ends(turn)[-1] == (E1, End.COMPLETE)
    assert turn.attempts[-1].kept == 0


async def answered_first_by(content: bytes, world: World) -> Turn:
    """A turn whose first engine answers so, as soon as there is another one."""
    async with world.client() as client:

        async def broken(request: web.Request, asked: Asked) -> web.StreamResponse:
            await world.mind.route(E1, 1, world.stubs[1].port)
            while len(client.addresses) < 2:
                await anyio.sleep(0.01)
            return await says(content)(request, asked)

        async with scripted(broken) as engine:
            await world.mind.route(E0, 1, engine.port)
            return await client.generate(PROMPT, params())


# --- routes that are missed, doubled or stale ---------------------------------------------------------


async def test_an_old_engine_that_still_answers_gets_no_call_and_nothing_it_says_late_is_taken(
    world: World,
) -> None:
    old, new = world.stubs[:2]
    await world.mind.route(E0, 1, old.port)
    async with world.client() as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 10)
        await world.mind.route(E0, 2, new.port)  # the fence of the old one was never said
        turn = await rest(pieces)
        later = [await client.generate(PROMPT, params(4)) for _ in range(4)]
        assert client.addresses == [f"http://127.0.0.1:{new.port}"]
    world.assert_reference(turn)
    assert [(each.incarnation, each.reason) for each in turn.attempts] == [
        (1, End.FENCED),
        (2, End.COMPLETE),
    ]
    assert {each.attempts[0].incarnation for each in later} == {2}
    assert old.get("/health").status == 200


async def test_a_client_that_missed_the_fence_and_the_new_route_converges(world: World) -> None:
    old, new, other = (stub.port for stub in world.stubs)
    await world.mind.route(E0, 1, old)
    port = int(world.server.url.rpartition(":")[2])
    async with link_to(port) as link, world.client(url=f"redis://127.0.0.1:{link.port}") as client:
        link.cut_to_server()
        link.cut_to_client()
        await world.mind.fence(E0, 1)
        await world.mind.route(E0, 2, new)
        await world.mind.route(E1, 1, other)
        async with redis.Redis(port=port) as raw:
            await raw.xtrim(world.mind.job.keys.decisions, maxlen=1, approximate=False)
        link.join()
        expected = {f"http://127.0.0.1:{each}" for each in (new, other)}
        while set(client.addresses) != expected:
            await anyio.sleep(0.01)
        turn = await client.generate(PROMPT, params())
    world.assert_reference(turn)


async def test_engines_that_are_not_recovered_see_no_abort(world: World) -> None:
    """One engine is synced and routed anew while two others decode; their versions are told again too."""
    for engine, stub in zip((E0, E1), world.stubs, strict=False):
        await world.mind.route(engine, 1, stub.port)
    async with (
        world.client() as client,
        client.stream(PROMPT, params()) as first,
        client.stream(PROMPT, params()) as second,
    ):
        await heard(first, 5)
        await heard(second, 5)
        await world.mind.sync(E2, 1)
        await world.mind.route(E2, 1, world.stubs[2].port, version=V2)
        for engine, stub in zip((E0, E1), world.stubs, strict=False):
            await world.mind.route(engine, 1, stub.port, version=V1)
        turns = [await rest(first), await rest(second)]
    for turn in turns:
        world.assert_reference(turn)
        assert len(turn.attempts) == 1
    assert not [line for stub in world.stubs[:2] for line in stub.lines if "abort" in line]


# --- versions -----------------------------------------------------------------------------------------


async def test_one_version_only_is_cut_off_when_the_weights_move_and_replayed_at_once(world: World) -> None:
    stub = world.stubs[0]
    stub.knobs(stream_fault="hang", stream_fault_after=40, stream_fault_times=1)
    await world.mind.route(E0, 1, stub.port)
    async with (
        world.client(versions="same", idle_timeout_s=None) as client,
        client.stream(PROMPT, params()) as pieces,
    ):
        await heard(pieces, 40)  # no more would ever come
        label(stub, "7.2")
        await world.mind.route(E0, 1, stub.port, version=V2)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn) == [(E0, End.VERSION_MOVED), (E0, End.COMPLETE)]
    assert turn.versions == (Span("7.2", 0, 100),)
    assert turn.attempts[1].kept == 0
    assert turn.attempts[1].restarted is not None


async def test_one_version_only_lets_a_turn_go_on_that_has_no_token_yet(world: World) -> None:
    started = anyio.Event()
    go = anyio.Event()

    async def late(request: web.Request, asked: Asked) -> web.StreamResponse:
        started.set()
        await go.wait()
        return await serves(world.fleet.digest, version="7.2")(request, asked)

    async with scripted(late) as engine, world.client(versions="same") as client:
        await world.mind.route(E0, 1, engine.port)
        async with client.stream(PROMPT, params()) as pieces, anyio.create_task_group() as tasks:

            async def move() -> None:
                await started.wait()
                await world.mind.route(E0, 1, engine.port, version=V2)
                go.set()

            tasks.start_soon(move)
            turn = await rest(pieces)
    world.assert_reference(turn)
    assert len(turn.attempts) == 1
    assert turn.versions == (Span("7.2", 0, 100),)


async def test_mixed_versions_go_on_through_a_move_of_the_weights_and_say_where_it_was(world: World) -> None:
    stub = world.stubs[0]
    await world.mind.route(E0, 1, stub.port)
    async with world.client() as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 10)
        label(stub, "7.2")
        await world.mind.route(E0, 1, stub.port, version=V2)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert len(turn.attempts) == 1
    before, after = turn.versions
    assert (before.version, before.start, before.end) == ("7.1", 0, after.start)
    assert (after.version, after.end) == ("7.2", 100)
    assert before.end >= 10


@pytest.mark.parametrize("mode", ["restart", "continue"])
async def test_a_turn_that_is_cut_twice_while_versions_move_is_of_one_version_or_says_whose_each_token_is(
    world: World, mode: str
) -> None:
    for number, stub in enumerate(world.stubs, start=1):
        label(stub, f"7.{number}")
        if number < 3:
            stub.knobs(stream_fault="eof", stream_fault_after=20)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(mode=mode) as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 20)
        await world.mind.route(E1, 1, world.stubs[1].port, version=V2)
        await heard(pieces, 40 if mode == "continue" else 20)
        await world.mind.route(E2, 1, world.stubs[2].port, version=V3)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn) == [(E0, End.EOF), (E1, End.EOF), (E2, End.COMPLETE)]
    if mode == "continue":
        assert turn.versions == (Span("7.1", 0, 20), Span("7.2", 20, 40), Span("7.3", 40, 100))
    else:
        assert turn.versions == (Span("7.3", 0, 100),)
        assert [attempt.kept for attempt in turn.attempts] == [0, 0, 0]


# --- what may not be continued ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"structured_outputs": {"json": {"type": "object"}}}, "guided decoding (structured_outputs)"),
        ({"n": 2, "temperature": 1.0, "seed": 3}, "n > 1"),
    ],
)
async def test_grammars_and_several_choices_are_replayed_from_the_prompt_and_say_so(
    world: World, changes: dict[str, Any], why: str
) -> None:
    world.stubs[0].knobs(stream_fault="eof", stream_fault_after=20)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client() as client, client.stream(PROMPT, params(**changes)) as pieces:
        await heard(pieces, 10)
        await world.mind.route(E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    assert turn.complete
    assert [len(choice.token_ids) for choice in turn.choices] == [100] * (changes.get("n") or 1)
    assert (turn.attempts[1].kept, turn.attempts[1].restarted) == (0, why)


async def test_a_continuation_that_an_engine_refuses_is_replayed_from_the_prompt(world: World) -> None:
    """As one at the model's full length is, where the caller named no cap."""

    async def narrow(request: web.Request, asked: Asked) -> web.StreamResponse:
        if len(asked.body["token_ids"]) > len(PROMPT):
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        return await serves(world.fleet.digest)(request, asked)

    world.stubs[0].knobs(stream_fault="eof", stream_fault_after=20)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with (
        scripted(narrow) as engine,
        world.client() as client,
        client.stream(PROMPT, params()) as pieces,
    ):
        await heard(pieces, 20)
        await world.mind.route(E1, 1, engine.port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert ends(turn) == [(E0, End.EOF), (E1, End.REJECTED), (E1, End.COMPLETE)]
    assert [attempt.kept for attempt in turn.attempts] == [0, 20, 0]
    assert turn.attempts[2].restarted is not None
    assert "too long" in turn.attempts[2].restarted


# --- the seam -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shift", "limit"), [(0.0, 0.01), (0.25, float("inf")), (0.25, 0.01)])
async def test_the_drift_at_the_seam_is_measured_and_over_the_limit_the_turn_is_replayed(
    world: World, shift: float, limit: float
) -> None:
    """The first engine decodes with logprobs that no other would give for the same tokens."""
    world.stubs[0].knobs(stream_fault="eof", stream_fault_after=20, logprob_shift=shift)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(check_seam=limit) as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 20)
        await world.mind.route(E1, 1, world.stubs[1].port)
        turn = await rest(pieces)
    ids, logprobs = world.fleet.reference(100)
    second = turn.attempts[1]
    assert turn.token_ids == ids
    assert second.seam_drift == shift
    if shift <= limit:
        assert second.kept == 20
        assert turn.logprobs == [*(each + shift for each in logprobs[:20]), *logprobs[20:]]
    else:
        assert second.kept == 0
        assert second.restarted == "drift at the seam: 0.25 is over 0.01"
        assert turn.logprobs == logprobs


async def test_a_seam_that_cannot_be_measured_is_not_continued_over(world: World) -> None:
    world.stubs[0].knobs(stream_fault="eof", stream_fault_after=20)
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with (
        scripted(serves(world.fleet.digest)) as engine,  # answers a probe with a stream too
        world.client(check_seam=1.0) as client,
        client.stream(PROMPT, params()) as pieces,
    ):
        await heard(pieces, 20)
        await world.mind.route(E1, 1, engine.port)
        turn = await rest(pieces)
    world.assert_reference(turn)
    assert (turn.attempts[1].kept, turn.attempts[1].seam_drift) == (0, None)
    assert turn.attempts[1].restarted is not None
    assert "not measured" in turn.attempts[1].restarted


async def test_tokens_of_other_weights_are_no_measure_of_the_seam(world: World) -> None:
    world.stubs[0].knobs(stream_fault="eof", stream_fault_after=20, logprob_shift=0.25)
    label(world.stubs[1], "7.2")
    await world.mind.route(E0, 1, world.stubs[0].port)
    async with world.client(check_seam=0.01) as client, client.stream(PROMPT, params()) as pieces:
        await heard(pieces, 20)
        await world.mind.route(E1, 1, world.stubs[1].port, version=V2)
        turn = await rest(pieces)
    assert (turn.attempts[1].kept, turn.attempts[1].seam_drift) == (20, None)


# --- many at once -------------------------------------------------------------------------------------


async def test_storms_of_replays_come_in_bounded_numbers_and_leave_no_descriptor(world: World) -> None:
    world.stubs[0].knobs(stream_fault="cut", stream_fault_after=5)
    open_after = [await _storm(world, engine) for engine in (E1, E2)]
    assert open_after[1] <= open_after[0]


async def _storm(world: World, survivor_name: EngineName) -> int:
    """An engine dies with many turns, and one survivor takes them all; the descriptors open afterwards."""
    storm = 3 * REPLAYS_AT_ONCE
    waiting = most = 0
    full = anyio.Event()

    async def slow(request: web.Request, asked: Asked) -> web.StreamResponse:
        """No first token before as many wait for theirs as may; later ones find the door open."""
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if waiting == REPLAYS_AT_ONCE:
            full.set()
        await full.wait()
        await anyio.lowlevel.checkpoint()  # whoever else was let in would be counted by now
        waiting -= 1
        return await serves(world.fleet.digest)(request, asked)

    turns: list[Turn] = []
    async with scripted(slow) as survivor, world.client() as client:
        await world.mind.route(E0, 1, world.stubs[0].port)
        async with anyio.create_task_group() as tasks:

            async def generate() -> None:
                turns.append(await client.generate(PROMPT, params(20)))

            for _ in range(storm):
                tasks.start_soon(generate)
            await world.mind.suspicion()
            await world.mind.fence(E0, 1)
            await world.mind.route(survivor_name, 1, survivor.port)
        assert len(survivor.asked) == storm
    assert most == REPLAYS_AT_ONCE
    for turn in turns:
        world.assert_reference(turn, 20)
        assert [engine for engine, _ in ends(turn)] == [E0, survivor_name]
    await world.mind.fence(survivor_name, 1)
    return len(list(Path("/proc/self/fd").iterdir()))


FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import anyio
from relight.agents.replay.client import ReplayClient
from relight.agents.replay.turn import End

async def main(url, turns):
    ended, busy = [], 0
    async with ReplayClient(url, job="job", max_engine_failures=1) as client:
        async def one():
            turn = await client.generate([5, 6, 7], {"max_tokens": 20, "temperature": 0.0})
            ended.append((tuple(turn.token_ids), {attempt.reason for attempt in turn.attempts}))
        async with anyio.create_task_group() as tasks:
            for _ in range(turns):
                tasks.start_soon(one)
    assert len(ended) == turns and len({ids for ids, _ in ended}) == 1, ended
    assert set().union(*(ends for _, ends in ended)) == {End.COMPLETE, End.EXHAUSTED}

anyio.run(main, sys.argv[1], int(sys.argv[2]))
"""


async def test_a_process_out_of_descriptors_waits_and_blames_no_engine(world: World) -> None:
    await world.mind.route(E0, 1, world.stubs[0].port)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
    command = [sys.executable, "-c", FEW_DESCRIPTORS, world.server.url, "200"]
    ran = await anyio.run_process(command, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    assert await _suspicions(world) == []


CLIENT = """
import os, sys
import anyio
from relight.agents.replay.client import ReplayClient

async def turn(client):
    async with client.stream([5, 6, 7], {"max_tokens": 500_000, "temperature": 0.0}) as pieces:
        async for piece in pieces:
            os.write(1, b"x")
            await anyio.sleep_forever()

async def main(url, turns):
    async with ReplayClient(url, job="job") as client, anyio.create_task_group() as tasks:
        for _ in range(turns):
            tasks.start_soon(turn, client)

for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        anyio.run(main, sys.argv[1], int(sys.argv[3]))
while True:
    os.wait()
"""


async def test_killed_clients_leave_nothing_running_in_the_engine(world: World) -> None:
    stub, clients, turns = world.stubs[0], 5, 10
    await world.mind.route(E0, 1, stub.port)
    command = [sys.executable, "-c", CLIENT, world.server.url, str(clients), str(turns)]
    family = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert family.stdout is not None
        with anyio.fail_after(WITHIN_S):
            begun = await anyio.to_thread.run_sync(
                family.stdout.read, clients * turns, abandon_on_cancel=True
            )
        assert begun == b"x" * clients * turns
        assert _load(stub) == clients * turns
    finally:
        os.killpg(family.pid, signal.SIGKILL)
        family.communicate(timeout=WITHIN_S)
    while _load(stub) != 0:
        await anyio.sleep(0.01)
    async with world.client() as client:
        world.assert_reference(await client.generate(PROMPT, params()))


def _load(stub: Any) -> int:
    load: int = stub.get("/load").body["server_load"]
    return load


# --- busy engines, and turns that kill ----------------------------------------------------------------


async def test_two_busy_engines_are_not_asked_in_turns_without_a_rest(world: World) -> None:
    refusals = 0

    async def busy(request: web.Request, asked: Asked) -> web.StreamResponse:
        nonlocal refusals
        refusals += 1
        if refusals <= 4:
            return web.json_response({}, status=503, headers={"Retry-After": "0"})
        return await serves(world.fleet.digest)(request, asked)

    async with scripted(busy) as one, scripted(busy) as two, world.client(max_engine_failures=1) as client:
        await world.mind.route(E0, 1, one.port)
        await world.mind.route(E1, 1, two.port)
        while len(client.addresses) < 2:
            await anyio.sleep(0.01)
        turn = await client.generate(PROMPT, params())
    world.assert_reference(turn)
    assert [reason for _, reason in ends(turn)] == [End.OVERLOADED] * 4 + [End.COMPLETE]
    began = [attempt.started_at for attempt in turn.attempts]
    rests = [after - before for before, after in pairwise(began)]
    assert all(rest_s >= least for rest_s, least in zip(rests[1:], BACKOFF_S[1:4], strict=True))
    assert await _suspicions(world) == []


async def _suspicions(world: World) -> list[Any]:
    facts = await world.mind.job.tail(world.mind.job.keys.facts, count=10)
    return [entry for entry in facts if entry.type == "RouteSuspected"]


async def test_a_turn_that_two_engines_died_of_runs_alone_where_there_is_a_choice(world: World) -> None:
    dying = world.stubs[0]
    dying.knobs(stream_fault="cut", stream_fault_after=5)
    asked, go = anyio.Event(), anyio.Event()

    async def gated(request: web.Request, asking: Asked) -> web.StreamResponse:
        asked.set()
        await go.wait()
        return await serves(world.fleet.digest)(request, asking)

    others: list[Turn] = []
    async with scripted(gated) as third, world.client() as client, anyio.create_task_group() as tasks:

        async def generate() -> None:
            others.append(await client.generate(PROMPT, params()))

        async def play() -> None:
            for incarnation in (1, 2):
                await world.mind.route(E0, incarnation, dying.port)
                await world.mind.suspicion()
            await world.mind.route(E1, 1, third.port)
            await asked.wait()
            await world.mind.route(E2, 1, world.stubs[1].port)
            while len(client.addresses) < 2:
                await anyio.sleep(0.01)
            async with anyio.create_task_group() as rest_of_them:
                for _ in range(6):
                    rest_of_them.start_soon(generate)
            go.set()

        tasks.start_soon(play)
        turn = await client.generate(PROMPT, params())
    world.assert_reference(turn)
    assert [engine for engine, _ in ends(turn)] == [E0, E0, E1]
    assert {engine for other in others for engine, _ in ends(other)} == {E2}
    assert len(third.asked) == 1
