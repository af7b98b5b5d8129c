"""The node agent on real vLLM: server and worker killed, a core frozen, and kills in the middle of a start.

A killed core is the demo's. All engines are started at once, so that the whole costs less than each alone.
"""

import contextlib
import importlib.util
import os
import signal
from pathlib import Path
from typing import NamedTuple

import aiohttp
import anyio
import pytest

from relight.agents.node import marks, proc
from relight.agents.node.config import Engine, NodeFile
from relight.events.bus.embedded import Embedded
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, Healthy, StartFailed
from relight.events.ids import EngineName
from relight.events.version import BASE
from relight.orchestrator.cli.demo import model
from relight.orchestrator.cli.demo.layout import command_of
from tests.node_support import Player, alive, directing, kill, node_file, record, role

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(420),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
START_S = 300.0


class Fault(NamedTuple):
    """What is done to one engine."""

    victim: str
    number: signal.Signals
    at_s: float | None = None
    """Seconds after the start was ordered; none once it serves."""


FAULTS = {
    EngineName("server"): Fault("leader", signal.SIGKILL),
    EngineName("worker"): Fault("worker", signal.SIGKILL),
    EngineName("frozen"): Fault("core", signal.SIGSTOP),
    EngineName("early"): Fault("leader", signal.SIGKILL, 5.0),
    EngineName("middle"): Fault("any", signal.SIGKILL, 10.0),
    EngineName("late"): Fault("stop", signal.SIGKILL, 15.0),
}


def _engine(name: EngineName, base: Path, cache: Path) -> Engine:
    command, env = command_of("vllm")
    return Engine(name=name, command=command, env=env, model=str(base), cache_dir=str(cache), stall_s=4.0)


async def test_real_engines_die_in_every_way_and_are_proven_gone(server: Embedded, tmp_path: Path) -> None:
    model.make("vllm", tmp_path / "model")
    engines = (_engine(name, tmp_path / "model", tmp_path / "cache") for name in FAULTS)
    file = node_file(tmp_path / "state", *engines)
    segments: set[str] = set()
    async with directing(file, server.url) as player:
        await player.decide(*(player.start(engine=name, seconds=START_S) for name in FAULTS))
        await _kill_in_their_starts(player, file)
        serving = [name for name, fault in FAULTS.items() if fault.at_s is None]
        started = await _all_up(player, serving)
        for name in serving:
            await player.ask(Healthy, player.verify(BASE, engine=name, seconds=60), within_s=60)
        for name in serving:
            await _strike(player, file, started[name])
            segments |= {segment.path for segment in record(file, name).segments}
        slot = marks.slot_id(file.job, state_dir=file.state_path)
        assert not any(marks.family(slot, name) for name in FAULTS)
    assert segments and not any(Path(path).exists() for path in segments)
    assert not any(Path(record(file, name).tmpdir).exists() for name in FAULTS)


async def _kill_in_their_starts(player: Player, file: NodeFile) -> None:
    """At 5, 10 and 15 s after the order; the last one by a StopEngine, as an orchestrator would."""
    began = anyio.current_time()
    for name, fault in FAULTS.items():
        if fault.at_s is None:
            continue
        await anyio.sleep_until(began + fault.at_s)
        if fault.victim == "stop":
            order = player.stop(engine=name)
            await player.decide(order)
            stopped = await player.wait(EngineStopped, lambda fact, order=order: fact.answers == order.id)
            gone = stopped.proof.processes
        else:
            slot = marks.slot_id(file.job, state_dir=file.state_path)
            found = marks.family(slot, name)[1]
            leader = record(file, name).leader
            assert leader is not None
            kill(leader if fault.victim == "leader" else max(found, key=lambda each: each.start))
            failed = await player.wait(StartFailed, lambda fact, name=name: fact.engine == name)
            gone = failed.proof.processes
        assert gone and not any(map(alive, gone))


async def _all_up(player: Player, names: list[EngineName]) -> dict[EngineName, EngineStarted]:
    started = {fact.engine: fact for fact in player.seen(EngineStarted)}
    while set(names) - started.keys():
        fact = await player.wait(EngineStarted, within_s=START_S)
        started[fact.engine] = fact
    assert not {fact.engine for fact in player.seen(StartFailed)} & set(names)
    return started


async def _call(started: EngineStarted) -> None:
    """A client's call, which breaks with its engine."""
    sampling = {"max_tokens": 400, "ignore_eos": True}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling, "stream": False}
    with contextlib.suppress(aiohttp.ClientError):
        url = started.address + "/inference/v1/generate"
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            await answer.read()


async def _strike(player: Player, file: NodeFile, started: EngineStarted) -> None:
    """Do what is to be done to one that serves, in the middle of a generation."""
    fault = FAULTS[started.engine]
    victim = role(file, fault.victim, started.engine)
    assert len({each.pid for each in started.processes}) >= 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_call, started)
        await anyio.sleep(0.3)
        if fault.number is signal.SIGKILL:
            kill(victim)
        else:
            os.kill(victim.pid, fault.number)
        dead = await player.wait(EngineDead, lambda fact: fact.engine == started.engine, within_s=30)
        tasks.cancel_scope.cancel()
    if fault.number is signal.SIGKILL:
        assert (dead.cause, dead.signal) == ("signal", 9), dead
        assert dead.detect_ms is not None and dead.detect_ms < 1000
    else:
        assert dead.cause == "stall"
        assert proc.liveness(victim) is proc.Liveness.ALIVE
    stopped = await player.ask(EngineStopped, player.stop(engine=started.engine, seconds=30), within_s=30)
    assert set(started.processes) <= set(stopped.proof.processes)
    assert not any(map(alive, stopped.proof.processes)) and stopped.proof.port_free
    assert sum(fact.engine == started.engine for fact in player.seen(EngineDead)) == 1
