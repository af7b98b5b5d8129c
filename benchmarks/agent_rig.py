"""What the agent's benchmark runs against: a bus, one `relight agent` process, and any number of stubs."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
from safetensors.numpy import save_file
from tests.node_support import Player, playing, swept

from relight.agents.node import config
from relight.agents.node.config import NodeFile
from relight.events.bus.embedded import embedded
from relight.events.facts import EngineStarted, Healthy, NodeUp
from relight.events.ids import EngineName, JobName
from relight.events.version import BASE

JOB = JobName("bench")
STOP_S = 120.0
"""For an agent to stop all its engines."""
START_S = 300.0
"""For one start while all the others start too."""
NODE = 'job = "bench"\nnode = "node-a"\nstate_dir = "{root}/agent"\n'
ENGINE = """
[[engines]]
name = "e{number}"
stall_s = {stall_s}
grace_s = 2.0
command = ["{python}", "-m", "relight.agents.stub", "--model", "{root}/model", "--port", "{{port}}",
           "--max-model-len", "100000"]
"""


class Rig:
    """A node whose orchestrator is the benchmark itself."""

    def __init__(self, player: Player, agent: "subprocess.Popen[bytes]", file: NodeFile) -> None:
        self.player = player
        self.agent = agent
        self.file = file
        self.incarnations = {engine.name: 0 for engine in file.engines}
        self.started: dict[EngineName, EngineStarted] = {}

    async def fill(self, names: Sequence[EngineName]) -> None:
        """Start an engine in each of these slots and prove it, so that it serves."""
        for name in names:
            self.incarnations[name] += 1
            order = self.player.start(self.incarnations[name], engine=name, seconds=START_S)
            await self.player.decide(order)
        for _ in names:
            up = await self.player.wait(EngineStarted, within_s=START_S)
            self.started[up.engine] = up
        for name in names:
            order = self.player.verify(BASE, self.incarnations[name], engine=name)
            await self.player.ask(Healthy, order)

    def cpu_s(self) -> float:
        """CPU seconds that the agent's own process has used."""
        fields = Path(f"/proc/{self.agent.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def node(root: Path, *, engines: int, stall_s: float = 10.0) -> AsyncGenerator[Rig]:
    """A node of so many empty slots; nothing of it is left afterwards."""
    (root / "model").mkdir(parents=True)
    save_file({"model.weight": np.zeros((64, 64), dtype=np.float32)}, root / "model" / "model.safetensors")
    tables = [
        ENGINE.format(root=root, number=number, python=sys.executable, stall_s=stall_s)
        for number in range(engines)
    ]
    (root / "node.toml").write_text(NODE.format(root=root) + "".join(tables))
    file = config.load(root / "node.toml")
    with swept(file), embedded(root / "bus") as bus:
        async with playing(bus.url, job=JOB) as player:
            with (root / "agent.log").open("wb") as log:
                words = ["agent", "--bus", bus.url, "--config", str(root / "node.toml"), "--stop-engines"]
                agent = subprocess.Popen(  # noqa: ASYNC220 -- nothing else runs in the loop yet
                    [sys.executable, "-m", "relight.orchestrator.cli", *words],
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                )
            try:
                await player.wait(NodeUp)
                yield Rig(player, agent, file)
            finally:
                agent.send_signal(signal.SIGTERM)
                await anyio.to_thread.run_sync(agent.wait, STOP_S)
