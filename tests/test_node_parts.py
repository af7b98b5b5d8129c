"""Engines over two nodes through two real agents and a real orchestrator: one unit, whatever happens."""

import importlib.util
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from relight.agents.node.config import Engine, FurtherPart, NodeFile, Spare, checked, load
from relight.agents.node.parts import split
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded, free_port
from relight.events.decisions import EngineRetired, RouteAdded, RouteFenced, StartEngine, StopEngine
from relight.events.errors import UsageError
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, NodeSilent, NodeUp, StartFailed
from relight.events.ids import EngineName, NodeName
from relight.events.schema import EngineState, Part
from relight.events.values import Phase, Place
from relight.orchestrator.cli.demo import model
from relight.orchestrator.cli.demo.layout import command_of
from relight.orchestrator.settings import Settings
from tests.node_support import (
    E0,
    JOB,
    NODE,
    agent_process,
    alive,
    directing,
    engine,
    kill,
    playing,
    post,
    record,
    role,
    running,
    swept,
)
from tests.orchestrator_support import Orchestrator, orchestrating, until
from tests.streams import Streams

pytestmark = pytest.mark.anyio

A, B = NodeName("node-a"), NodeName("node-b")
SOON = Settings(backoff_s=0.05, node_silence_s=60.0)
HEARD = Settings(backoff_s=0.05, node_silence_s=3.0)
"""Silent after three lost pulses."""
JOINED = "joined the head"


class Pair(NamedTuple):
    """The files of the two nodes of one engine."""

    head: NodeFile
    further: NodeFile


def whole(model: Path, *knobs: str) -> Engine:
    """A stub over two nodes as a job's file has it; `knobs` are its further part's."""
    nodes = ("--nnodes", "{parts}", "--master-addr", "{head}", "--master-port", str(free_port()))
    own = (*nodes, "--node-rank", "{part}")
    further = (sys.executable, "-m", "relight.agents.stub", "--model", str(model), "--headless")
    part = FurtherPart(command=(*further, *own, *knobs), ready=JOINED)
    return engine(model, *own, parts=(part,))


def pair(folder: Path, model: Path, *knobs: str) -> Pair:
    return placed_at_two(folder, whole(model, *knobs))


def placed_at_two(folder: Path, engine_: Engine) -> Pair:
    """The files of node-a, with the head, and node-b."""
    entries = split(engine_)
    files = [
        NodeFile(job=JOB, node=node, state_dir=str(folder / node), host="127.0.0.1", engines=(entry,))
        for node, entry in zip((A, B), entries, strict=True)
    ]
    return Pair(*files)


@asynccontextmanager
async def over_two_nodes(files: Pair, url: str, *, settings: Settings = SOON) -> AsyncIterator[Streams]:
    """Both agents and an orchestrator at work; nothing of the engine is left afterwards."""
    async with AsyncExitStack() as stack:
        for file in files:
            stack.enter_context(swept(file))
        bus = await stack.enter_async_context(open_bus(url))
        await stack.enter_async_context(orchestrating(url, jobs=(JOB,), settings=settings))
        for file in files:
            await stack.enter_async_context(running(file, url))
        yield Streams(bus.job(JOB))


async def served(heard: Streams, incarnation: int, *, within_s: float = 30.0) -> str:
    """The address of that incarnation, once it is routed and has generated."""
    start = await heard.until(StartEngine, lambda it: it.incarnation == incarnation, within_s=within_s)
    assert (start.node, start.parts, start.head) == (A, (B,), "127.0.0.1")
    route = await heard.until(RouteAdded, within_s=within_s)
    assert route.incarnation == incarnation
    return route.address


async def generates(heard: Streams, address: str) -> None:
    await heard.read()
    started = [fact for fact in heard.facts if isinstance(fact, EngineStarted) and fact.address == address]
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}, "stream": False}
    answer = await post(started[-1], "/inference/v1/generate", body)
    assert len(answer["choices"][0]["token_ids"]) == 4


def stopped(heard: Streams, incarnation: int) -> list[NodeName]:
    """The nodes that have proven it gone so far."""
    facts = [fact for fact in heard.facts if isinstance(fact, EngineStopped)]
    return [fact.node for fact in facts if fact.incarnation == incarnation]


def starts(heard: Streams) -> list[int]:
    return [order.incarnation for order in heard.decisions if isinstance(order, StartEngine)]


async def state_of(heard: Streams) -> EngineState:
    return (await heard.job.snapshot()).engines[E0]


class Loss(NamedTuple):
    """What is killed, at which node, and what is odd about the further part."""

    victim: str
    at: NodeName
    knobs: Sequence[str] = ()


LOSSES = {
    "a part's worker": Loss("worker", B),
    "a part's front": Loss("leader", B),
    "the head's core": Loss("core", A),
    "a head that its part outlives": Loss("core", A, ("--outlives-head",)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
async def test_one_part_dies_and_all_are_proven_gone_before_the_one_new_incarnation_serves(
    server: Embedded, tmp_path: Path, stub_model: Path, loss: Loss
) -> None:
    files = pair(tmp_path, stub_model, *loss.knobs)
    async with over_two_nodes(files, server.url) as heard:
        await generates(heard, await served(heard, 1))
        old = [member.process for file in files for member in record(file).members]
        kill(role(files.head if loss.at == A else files.further, loss.victim))
        await heard.until(RouteFenced)
        stop = await heard.until(StopEngine)
        assert [stop.node, *(place.node for place in stop.others)] == [A, B]
        assert stop.processes and all(place.processes for place in stop.others)
        address = await served(heard, 2)
        assert set(stopped(heard, 1)) == {A, B}
        assert {fact.incarnation for fact in heard.facts if isinstance(fact, EngineDead)} == {1}
        assert not any(map(alive, old))
        assert set(starts(heard)) == {1, 2}
        await generates(heard, address)


async def test_a_part_that_does_not_start_takes_the_whole_with_it_and_the_budget_ends_it(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    files = pair(tmp_path, stub_model, "--start-fails", "no such device")
    settings = Settings(backoff_s=0.05, restarts=1)
    async with over_two_nodes(files, server.url, settings=settings) as heard:
        failed = await heard.until(StartFailed)
        assert failed.node == B and "no such device" in failed.detail
        retired = await heard.until(EngineRetired)
        await heard.read()
        assert retired.incarnation == 2 and starts(heard)[-1] == 2
        assert A in (*stopped(heard, 1), *stopped(heard, 2))  # the head waited for its part
        assert not any(alive(member.process) for file in files for member in record(file).members)


async def test_a_silent_node_fences_the_whole_and_no_other_starts_before_it_has_proven_its_part_gone(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    files = pair(tmp_path, stub_model, "--outlives-head")
    async with AsyncExitStack() as stack:
        for file in files:
            stack.enter_context(swept(file))
        bus = await stack.enter_async_context(open_bus(server.url))
        heard = Streams(bus.job(JOB))
        await stack.enter_async_context(orchestrating(server.url, jobs=(JOB,), settings=HEARD))
        await stack.enter_async_context(running(files.head, server.url))
        agent = stack.enter_context(agent_process(files.further, server.url, tmp_path / "b.json"))
        await served(heard, 1)
        agent.send_signal(signal.SIGSTOP)
        await heard.until(NodeSilent, lambda it: it.node == B)
        await heard.until(RouteFenced)
        agent.send_signal(signal.SIGCONT)
        assert (await heard.until(RouteAdded)).incarnation == 1  # its return costs nothing
        agent.send_signal(signal.SIGSTOP)
        await heard.until(NodeSilent, lambda it: it.node == B)
        part = role(files.further, "worker")
        kill(role(files.head, "core"))
        await heard.until(StopEngine)

        async def only_b_is_awaited() -> bool:
            state = await state_of(heard)
            return state.gone == 1

        await until(only_b_is_awaited)
        state = await state_of(heard)
        assert (state.phase, state.parts[0].gone) == (Phase.STOPPING, 0)
        await heard.read()
        assert alive(part) and set(starts(heard)) == {1}
        agent.send_signal(signal.SIGCONT)
        await served(heard, 2)
        assert not alive(part) and set(stopped(heard, 1)) == {A, B}


def ended(orchestrator: Orchestrator) -> None:
    if orchestrator.is_running():
        orchestrator.kill()


async def test_an_orchestrator_that_dies_between_the_two_proofs_leaves_the_second_to_its_successor(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    files = pair(tmp_path, stub_model, "--outlives-head")
    config = tmp_path / "settings.toml"
    config.write_text("[defaults]\nlease_s = 1.0\nbackoff_s = 0.05\nnode_silence_s = 60.0\n")
    options = ("--job", JOB, "--config", str(config))
    async with AsyncExitStack() as stack:
        for file in files:
            stack.enter_context(swept(file))
        bus = await stack.enter_async_context(open_bus(server.url))
        heard = Streams(bus.job(JOB))
        first = Orchestrator(server.url, tmp_path / "first.log", *options)
        stack.callback(ended, first)
        await stack.enter_async_context(running(files.head, server.url))
        agent = stack.enter_context(agent_process(files.further, server.url, tmp_path / "b.json"))
        await served(heard, 1)
        agent.send_signal(signal.SIGSTOP)
        kill(role(files.head, "core"))

        async def the_head_is_gone() -> bool:
            return (await state_of(heard)).gone == 1

        await until(the_head_is_gone)
        first.kill()
        second = Orchestrator(server.url, tmp_path / "second.log", *options)
        stack.callback(ended, second)
        agent.send_signal(signal.SIGCONT)
        await served(heard, 2)
        assert set(stopped(heard, 1)) == {A, B} and set(starts(heard)) == {1, 2}


HEADLESS = """
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    args.api_server_count = 0
    run_headless(args)
"""
"""What `vllm serve --headless` runs; the command line itself does not start where vLLM's CPU build has a name
of its own."""


def vllm_over_two(folder: Path) -> Engine:
    """A tiny model whose tensors are dealt to two nodes."""
    model.make("vllm", folder)
    command, env = command_of("vllm")
    program = folder.parent / "headless.py"
    program.write_text(HEADLESS)
    nodes = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--nnodes", "{parts}")
    nodes += ("--node-rank", "{part}", "--master-addr", "{head}", "--master-port", str(free_port()))
    here = command.index("--host")
    further = (sys.executable, str(program), *command[3:here], *command[here + 4 :], *nodes, "--headless")
    return Engine(
        name=E0,
        command=(*command, *nodes),
        env={**env, "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        model=str(folder),
        grace_s=3.0,
        parts=(FurtherPart(command=further),),
    )


@pytest.mark.vllm
@pytest.mark.timeout(420)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
async def test_a_real_engine_over_two_nodes_serves_and_is_ended_whole(
    server: Embedded, tmp_path: Path
) -> None:
    files = placed_at_two(tmp_path, vllm_over_two(tmp_path / "model"))
    async with over_two_nodes(files, server.url) as heard:
        await generates(heard, await served(heard, 1, within_s=360.0))
        old = [member.process for file in files for member in record(file).members]
        await until(lambda: any(each.role == "worker" for each in record(files.further).members))
        kill(role(files.further, "worker"))  # vLLM's own head notices nothing before its next call
        assert (await heard.until(EngineDead)).node == B
        await heard.until(StartEngine, lambda it: it.incarnation == 2, within_s=60.0)
        await heard.read()
        assert set(stopped(heard, 1)) == {A, B} and not any(map(alive, old))


# --- one agent with a further part -----------------------------------------------------------------


def lone_part(folder: Path, *, text: str = "up", then: str = "sleep 600", ready: str = "up") -> NodeFile:
    """A node with a further part that is a shell."""
    command = ("sh", "-c", f"echo {text} {{part}} {{parts}} {{head}} $OWN; {then}")
    entry = Engine(name=E0, command=command, env={"OWN": "p{part}"}, part=1, parts=2, ready=ready)
    return NodeFile(job=JOB, node=NODE, state_dir=str(folder / "state"), engines=(entry,))


def placed(order: Any, *nodes: str, **changes: Any) -> Any:
    """The order for an engine whose head is elsewhere and whose part 1 is here, unless told otherwise."""
    head, *parts = map(NodeName, nodes or ("node-z", NODE))
    if isinstance(order, StopEngine):
        changes["others"] = tuple(Place(node, order.processes) for node in parts)
    else:
        changes |= {"parts": tuple(parts), "head": "head.example"}
    return msgspec.structs.replace(order, node=head, **changes)


async def test_a_part_is_up_when_its_log_tells_so_and_has_no_server(server: Embedded, tmp_path: Path) -> None:
    file = lone_part(tmp_path)
    async with directing(file, server.url) as player:
        report = player.seen(NodeUp)[0].engines[0]
        assert (report.state, report.part, report.parts) == ("absent", 1, 2)
        started = await player.ask(EngineStarted, placed(player.start()))
        assert (started.node, started.address, len(started.processes) > 0) == (NODE, "", True)
        log = file.state_path / "engines" / E0
        assert any("up 1 2 head.example p1" in path.read_text() for path in log.rglob("log"))
        again = await player.ask(EngineStarted, placed(player.start()))
        assert again.processes == started.processes
        kill(started.processes[0])
        dead = await player.wait(EngineDead)
        assert (dead.node, dead.signal) == (NODE, signal.SIGKILL)
        gone = await player.ask(EngineStopped, placed(player.stop()))
        assert gone.node == NODE and set(started.processes) <= set(gone.proof.processes)


async def test_a_part_that_ends_before_it_is_up_has_failed_and_says_why(
    server: Embedded, tmp_path: Path
) -> None:
    file = lone_part(tmp_path, text="no device", then="exit 3", ready="never")
    async with directing(file, server.url) as player:
        failed = await player.ask(StartFailed, placed(player.start()))
        assert (failed.node, failed.cause) == (NODE, "exit") and "no device 1 2" in failed.detail


@pytest.mark.parametrize("nodes", [(NODE,), (NODE, "node-z"), ("node-z", "node-y", NODE)])
async def test_a_part_is_not_started_in_another_ones_place(
    server: Embedded, tmp_path: Path, nodes: Sequence[str]
) -> None:
    async with directing(lone_part(tmp_path), server.url) as player:
        failed = await player.ask(StartFailed, placed(player.start(), *nodes))
        assert (failed.cause, failed.retryable) == ("parts", False)
        assert "node-a has part 1 of 2" in failed.detail and ", ".join(nodes) in failed.detail


async def test_a_part_waits_for_the_drain_of_its_head_until_it_is_told_that_there_is_none(
    server: Embedded, tmp_path: Path
) -> None:
    async with directing(lone_part(tmp_path), server.url) as player:
        started = await player.ask(EngineStarted, placed(player.start()))
        await player.decide(placed(player.stop(seconds=120.0, drain_s=60.0, then="drained")))
        with pytest.raises(TimeoutError):
            await player.wait(EngineStopped, within_s=0.5)
        assert all(map(alive, started.processes))
        await player.ask(EngineStopped, placed(player.stop(then="drained")))


async def test_a_successor_adopts_a_part_also_where_its_disk_is_lost(
    server: Embedded, tmp_path: Path
) -> None:
    file = lone_part(tmp_path)
    with swept(file):
        async with playing(server.url) as player:
            async with running(file, server.url, stop_engines=False):
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, placed(player.start()))
            async with running(file, server.url, stop_engines=False):
                told = (await player.wait(NodeUp)).engines[0]
                assert (told.state, told.incarnation, told.processes) == ("up", 1, started.processes)
            shutil.rmtree(file.state_path)
            part = Part(node=NODE, processes=started.processes, up=1)
            state = EngineState(phase=Phase.SERVING, node=NodeName("z"), incarnation=1, parts=(part,))
            await player.decide(e0=state)
            async with running(file, server.url):
                told = (await player.wait(NodeUp)).engines[0]
                assert (told.state, told.incarnation, told.processes) == ("up", 1, started.processes)
                kill(started.processes[0])
                assert (await player.wait(EngineDead)).node == NODE


async def test_a_spare_takes_whichever_part_it_is_asked_for(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    head = engine(stub_model, "--nnodes", "1", parts=2)
    further = lone_part(tmp_path).engines[0]
    spare = Spare(slots=1, engines=(head, further))
    file = checked(NodeFile(job=JOB, node=NODE, state_dir=str(tmp_path / "s"), spare=spare), where="test")
    with swept(msgspec.structs.replace(file, engines=(head,))):
        async with directing(file, server.url) as player:
            up = player.seen(NodeUp)[0]
            assert (up.spares, up.spare_parts, up.engines) == (1, True, ())
            part = await player.ask(EngineStarted, placed(player.start()))
            assert part.address == ""
            await player.ask(EngineStopped, placed(player.stop()))
            whole_ = await player.ask(EngineStarted, placed(player.start(2), NODE, "node-z"))
            assert whole_.address.startswith("http://")
            third = await player.ask(StartFailed, placed(player.start(3), "node-y", "node-z", NODE))
            assert (third.cause, third.retryable) == ("undefined", False)


# --- files -----------------------------------------------------------------------------------------


def test_a_jobs_engine_is_split_into_one_entry_for_each_node(stub_model: Path) -> None:
    engine_ = whole(stub_model, "--outlives-head")
    head, further = split(engine_)
    assert (head.part, head.parts, further.part, further.parts) == (0, 2, 1, 2)
    assert head.command == engine_.command and "--headless" in further.command
    assert (head.name, head.ready, further.name, further.ready) == (E0, "", E0, JOINED)
    alone = engine(stub_model)
    assert split(alone) == (alone,)
    shared = Engine(
        name=EngineName("e1"), command=("x", "{port}"), env={"A": "1", "B": "1"}, port=8000, grace_s=3.0,
        parts=(FurtherPart(command=("y",), env={"B": "2"}), FurtherPart(command=("z",))),
    )  # fmt: skip
    entries = split(shared)
    assert [each.env for each in entries] == [
        {"A": "1", "B": "1"},
        {"A": "1", "B": "2"},
        {"A": "1", "B": "1"},
    ]
    assert [(each.port, each.grace_s, each.parts) for each in entries] == [
        (8000, 3, 3),
        (None, 3, 3),
        (None, 3, 3),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("part = 1", "$.engines[0].part 1 is none of 1 `parts`"),
        ("part = 2\nparts = 2", "$.engines[0].part 2 is none of 2 `parts`"),
        ("part = 1\nparts = 2\nport = 80", "$.engines[0].port is the head's: part 1 has no server"),
        ('part = 1\nparts = 2\nenv = { P = "{port}" }', "$.engines[0].{port} is the head's"),
        ('part = 1\nparts = 2\nlauncher = "delegated"', "$.engines[0].launcher 'delegated'"),
        ('parts = 2\nready = "up"', "$.engines[0].ready 'up' is a further part's"),
        ('parts = [{ command = ["sh"] }]', "$.engines[0].parts: each stands in its own node's file"),
        ('parts = "2"', "$.engines[0].parts"),
        ('parts = [{ comand = ["sh"] }]', "$.engines[0].parts"),
    ],
)
def test_a_node_file_names_what_is_wrong_with_its_part(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "node.toml"
    command = '["sh", "-c", "x"]' if line.startswith("part =") else '["sh", "-c", "{port}"]'
    above = 'job = "j"\nnode = "n"\nstate_dir = "/tmp/n"\n[[engines]]\nname = "e0"\n'
    path.write_text(f"{above}command = {command}\n{line}\n")
    with pytest.raises(UsageError) as error:
        load(path)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": ()}, "$.parts is empty"),
        ({"part": 1}, "$.part 1"),
        ({"launcher": "delegated"}, "$.launcher 'delegated' starts engines on one node only"),
        ({"parts": (FurtherPart(command=("a", "--port={port}")),)}, "$.parts[0].{port} is the head's"),
    ],
)
def test_a_job_file_names_what_is_wrong_with_its_parts(changes: dict[str, Any], words: str) -> None:
    good = {"name": E0, "command": ("a", "{port}"), "parts": (FurtherPart(command=("b",)),)}
    with pytest.raises(UsageError) as error:
        split(Engine(**{**good, **changes}), at="$.")
    assert words in str(error.value)
