"""Whole nodes: what is done while one cannot be heard, what when it returns, and what not.

Real agents with stub engines, each on a machine of its own, a real orchestrator and a real client.
"""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from relight.agents.node.config import Engine, NodeFile, Spare, checked
from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.client import open_bus
from relight.events.decisions import (
    Alarm,
    ProbeEngine,
    RouteAdded,
    RouteFenced,
    StartEngine,
    StopEngine,
    VerifyEngine,
)
from relight.events.facts import EngineDead, EngineStopped, Healthy, NodeSilent, RouteSuspected
from relight.events.ids import EngineName, NodeName
from relight.orchestrator.settings import Settings
from tests.integration_rig import asked, counted, running
from tests.node_support import JOB, alive, kill, node_file, record, role
from tests.orchestrator_support import orchestrating, until
from tests.partition_rig import Machines, machines, namespaces_are_allowed
from tests.scenario import short
from tests.streams import M, Streams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

A, B, C = NodeName("a"), NodeName("b"), NodeName("c")
E0, E1, E2 = EngineName("e0"), EngineName("e1"), EngineName("e2")
SOON = Settings(node_silence_s=6.0, move_after_s=5.0, backoff_s=0.0)
WITHIN_S = 180.0
"""For whatever is awaited: machines that run tests are busy."""
TOKENS = 450
"""Of a call that is still running when a node has been silent for long enough."""

NETWORK = pytest.param(
    True,
    id="namespaces",
    marks=pytest.mark.skipif(
        not namespaces_are_allowed(), reason="this machine allows no network namespaces"
    ),
)
LINK = pytest.param(False, id="link")


def engine(model: Path, name: EngineName) -> Engine:
    command = (sys.executable, "-m", "relight.agents.stub", "--model", str(model), "--host", "0.0.0.0")
    return Engine(name=name, command=(*command, "--port", "{port}", "--token-interval-ms", "20"))


def node(folder: Path, model: Path, name: NodeName, *engines: EngineName) -> NodeFile:
    return node_file(folder / name, *(engine(model, each) for each in engines), node=name)


class Patient(Streams):
    """Both streams, for a busy machine."""

    async def until(
        self, kind: type[M], where: Callable[[M], bool] = lambda _: True, *, within_s: float = WITHIN_S
    ) -> M:
        return await super().until(kind, where, within_s=within_s)


@asynccontextmanager
async def world(folder: Path, *, namespaces: bool) -> AsyncIterator[tuple[Machines, "Patient"]]:
    async with (
        machines(folder, namespaces=namespaces) as net,
        open_bus(net.url) as bus,
        orchestrating(net.url, jobs=(JOB,), settings=SOON),
    ):
        heard = Patient(bus.job(JOB))
        try:
            yield net, heard
        except BaseException:
            print("\n".join(map(short, heard.decisions)))  # for whoever reads of the failure
            print("\n".join(f"{kind}: {text}" for kind, text in net.logs().items()))
            raise


async def generate(address: str, tokens: int) -> Any:
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling, "stream": False}
    return await asked(f"{address}/inference/v1/generate", body)


def decided(heard: Streams, kind: type[Any], *engines: EngineName) -> list[Any]:
    return [each for each in heard.decisions if isinstance(each, kind) and each.engine in engines]


@pytest.mark.parametrize("namespaces", [NETWORK, LINK])
async def test_a_node_that_the_bus_does_not_hear_is_fenced_and_its_return_is_verified(
    tmp_path: Path, stub_model: Path, *, namespaces: bool
) -> None:
    async with world(tmp_path, namespaces=namespaces) as (net, heard):
        await net.agent(node(tmp_path, stub_model, A, E0))
        lost = await net.agent(node(tmp_path, stub_model, B, E1))
        routes = {}
        while len(routes) < 2:
            route = await heard.until(RouteAdded)
            routes[route.engine] = route
        client = await net.gateway()
        first = record(lost, E1)

        # A call is under way on each engine when the bus hears no more of one of them.
        answers: list[Any] = []
        async with anyio.create_task_group() as calls:

            async def call() -> None:
                answers.append(await generate(client, TOKENS))

            calls.start_soon(call)
            await until(lambda: _busy(routes, 1), within_s=WITHIN_S)
            calls.start_soon(call)
            await until(lambda: _busy(routes, 2), within_s=WITHIN_S)
            net.cut_from_bus(B)
            assert (await heard.until(NodeSilent)).node == B
            fenced = await heard.until(RouteFenced)
            assert (fenced.engine, fenced.incarnation) == (E1, 1)
        expected = reference(weights_digest(stub_model), [1, 2, 3], TOKENS)[0]
        assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected, expected]
        assert await counted(client, "relight_replay_kept_tokens_total") > 0, "one call went on elsewhere"
        assert all(alive(member.process) for member in first.members), "it was not heard: that is no death"

        # It returns as it was, and is looked at before it is routed.
        net.join_to_bus(B)
        assert (await heard.until(VerifyEngine)).engine == E1
        back = await heard.until(RouteAdded)
        assert (back.engine, back.incarnation, back.address) == (E1, 1, routes[E1].address)
        assert record(lost, E1).members == first.members

        # Once more, and this time its engine dies where nobody hears of it.
        net.cut_from_bus(B)
        assert (await heard.until(NodeSilent)).node == B
        kill(role(lost, "core", E1))
        assert decided(heard, StopEngine, E0, E1) == []
        assert [start.incarnation for start in decided(heard, StartEngine, E0, E1)] == [1, 1]
        net.join_to_bus(B)
        assert (await heard.until(EngineDead)).incarnation == 1
        assert (await heard.until(StartEngine)).incarnation == 2
        again = await heard.until(RouteAdded)
        assert (again.engine, again.incarnation) == (E1, 2)


async def _busy(routes: dict[EngineName, RouteAdded], engines: int) -> bool:
    return sum([await running(route.address) > 0 for route in routes.values()]) >= engines


@pytest.mark.parametrize("namespaces", [namespaces_are_allowed()], ids=["namespaces or link"])
async def test_most_nodes_silent_is_an_alarm_and_what_was_moved_since_is_never_routed_again(
    tmp_path: Path, stub_model: Path, *, namespaces: bool
) -> None:
    """Two of three are silent: nothing moves. One is heard again: what the other had goes to the spare."""
    spare = Spare(slots=2, engines=tuple(engine(stub_model, each) for each in (E1, E2)))
    home = checked(
        msgspec.structs.replace(node(tmp_path, stub_model, A, E0), spare=spare),
        where="test",
    )
    async with world(tmp_path, namespaces=namespaces) as (net, heard):
        await net.agent(home)
        await net.agent(node(tmp_path, stub_model, B, E1))
        lost = await net.agent(node(tmp_path, stub_model, C, E2))
        for _ in range(3):
            await heard.until(RouteAdded)
        old = record(lost, E2)
        for each in (B, C):
            net.cut_from_bus(each)
        assert {(await heard.until(NodeSilent)).node for _ in range(2)} == {B, C}
        alarm = await heard.until(Alarm, lambda it: it.kind == "silence")
        assert alarm.detail == "2 of 3 nodes are silent"

        # For longer than a move waits.
        await anyio.sleep(SOON.move_after_s + 1)
        await heard.read()
        assert decided(heard, StopEngine, E0, E1, E2) == []
        assert len(decided(heard, StartEngine, E0, E1, E2)) == 3

        # One of three: the brake is off. The one that is heard again keeps its engine, or gets it back.
        net.join_to_bus(B)
        moved = await heard.until(StartEngine, lambda it: it.engine == E2)
        assert (moved.node, moved.incarnation) == (A, 2)
        assert all(alive(member.process) for member in old.members), "its node has not said that it is gone"
        second = await heard.until(RouteAdded, lambda it: it.engine == E2)
        assert second.incarnation == 2

        # The other one returns with an incarnation that is over.
        net.join_to_bus(C)
        end = await heard.until(StopEngine, lambda it: it.engine == E2)
        assert (end.node, end.incarnation) == (C, 1)
        gone = await heard.until(EngineStopped, lambda it: it.engine == E2)
        assert (gone.node, gone.incarnation) == (C, 1)
        assert not any(alive(member.process) for member in old.members)
        routed = [route.incarnation for route in decided(heard, RouteAdded, E2)]
        assert routed == sorted(routed)


@pytest.mark.parametrize("namespaces", [NETWORK, LINK])
async def test_an_engine_that_one_client_does_not_reach_is_alive_and_avoided_by_that_client_alone(
    tmp_path: Path, stub_model: Path, *, namespaces: bool
) -> None:
    async with world(tmp_path, namespaces=namespaces) as (net, heard):
        await net.agent(node(tmp_path, stub_model, A, E0))
        await net.agent(node(tmp_path, stub_model, B, E1))
        routes = {}
        while len(routes) < 2:
            route = await heard.until(RouteAdded)
            routes[route.engine] = route
        client = await net.gateway(apart=(B, routes[E1].address))
        await net.cut_from_client(B)
        expected = reference(weights_digest(stub_model), [1, 2, 3], 30)[0]

        # The probe says that it is alive, so that it is tried once more.
        answers: list[Any] = []
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                hinted = anyio.Event()
                tasks.start_soon(call_in_pairs, client, hinted, answers)
                hint = await heard.until(RouteSuspected)
                hinted.set()
                assert (hint.engine, hint.incarnation) == (E1, 1)
                probe = await heard.until(ProbeEngine, lambda it: it.engine == E1)
            well = await heard.until(Healthy, lambda it, probe=probe: it.answers == probe.id)
            assert (well.engine, well.incarnation) == (E1, 1)
            told = await heard.until(RouteAdded)
            assert (told.engine, told.incarnation, told.address) == (E1, 1, routes[E1].address)
        assert all(answer["choices"][0]["token_ids"] == expected for answer in answers)

        # From then on this client goes elsewhere, also when all it has is busy; others use the engine.
        async with anyio.create_task_group() as calls:
            for _ in range(4):
                calls.start_soon(generate, client, TOKENS)
            await until(lambda: _running(routes[E0].address, 4), within_s=WITHIN_S)
        await generate(routes[E1].address, 3)
        await heard.read()
        assert len([each for each in heard.facts if isinstance(each, RouteSuspected)]) == 2
        assert decided(heard, RouteFenced, E0, E1) == []
        assert decided(heard, StopEngine, E0, E1) == []


async def call_in_pairs(client: str, enough: anyio.Event, answers: list[Any]) -> None:
    """Two calls at a time, of which one goes to each engine that the client trusts."""

    async def call() -> None:
        answers.append(await generate(client, 30))

    while not enough.is_set():
        async with anyio.create_task_group() as calls:
            calls.start_soon(call)
            calls.start_soon(call)


async def _running(address: str, calls: int) -> bool:
    return await running(address) == calls
