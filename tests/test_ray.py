"""Jobs in Ray clusters: their files, agents that outlive actors and end with raylets, the short matrix."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from relight.agents.adapters.ray import cluster, host, jobfile, tending
from relight.agents.adapters.ray.holder import Held
from relight.agents.adapters.ray.jobfile import JobFile, node_file
from relight.agents.node.config import NodeFile
from relight.events.bus.embedded import Embedded
from relight.events.bus.job import Pulse
from relight.events.errors import BusUnavailable, UsageError
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, NodeUp
from relight.events.ids import BootId, NodeName, Source, agent_source
from relight.events.values import Process
from relight.orchestrator.cli.main import main
from relight.orchestrator.cli.ray import Waiting
from tests import node_support
from tests.node_support import Player, alive, engine, kill, playing, swept

pytestmark = pytest.mark.anyio

GOOD = f'''job = "grpo-1"
[[engines]]
name = "e0"
command = ["{sys.executable}", "{{port}}"]
[[engines]]
name = "e1"
command = ["{sys.executable}", "{{port}}"]
[ray]
bundles = 2
spares = 1
resources = {{ CPU = 4, GPU = 2 }}
'''


def loaded(tmp_path: Path, text: str = GOOD) -> JobFile:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return jobfile.load(path)


def on_node(file: JobFile, bundle: int, *devices: str) -> NodeFile:
    return node_file(file, bundle, ray_node="0123456789abcdef", host="10.0.0.1", devices=devices)


# --- the file --------------------------------------------------------------------------------------


def test_engines_are_dealt_to_bundles_and_the_spare_one_may_take_any(tmp_path: Path) -> None:
    file = loaded(tmp_path, f"state_dir = '{tmp_path}'\n{GOOD}")
    home, spare = on_node(file, 1, "4", "5"), on_node(file, 2, "6", "7")
    assert home.node == "bundle-1-0123456789ab"
    assert home.state_path == tmp_path / "grpo-1" / home.node
    assert [(each.name, each.env) for each in home.engines] == [("e1", {"CUDA_VISIBLE_DEVICES": "4,5"})]
    assert home.spare is not None and (home.spare.slots, home.spare.engines[0].name) == (0, "e0")
    assert spare.engines == () and spare.spare is not None
    assert (spare.spare.slots, spare.spare.devices, spare.spare.each) == (1, ("6,7",), "2 GPU and 4 CPU")
    assert [each.name for each in spare.spare.engines] == ["e0", "e1"]


def test_parts_of_one_engine_are_dealt_to_as_many_bundles_and_may_all_come_to_the_spare_one(
    tmp_path: Path,
) -> None:
    further = f'[[engines.parts]]\ncommand = ["{sys.executable}"]\n'
    file = loaded(tmp_path, GOOD.replace("[ray]", f"{further}[ray]").replace("bundles = 2", "bundles = 3"))
    homes = [[(each.name, each.part) for each in on_node(file, bundle).engines] for bundle in range(3)]
    assert homes == [[("e0", 0)], [("e1", 0)], [("e1", 1)]]
    spare = on_node(file, 3).spare
    assert spare is not None
    assert [(each.name, each.part, each.parts) for each in spare.engines] == [
        ("e0", 0, 1),
        ("e1", 0, 2),
        ("e1", 1, 2),
    ]
    with pytest.raises(UsageError, match=r"\$\.ray\.bundles 1 are fewer than the parts"):
        loaded(tmp_path, GOOD.replace("[ray]", f"{further}[ray]").replace("bundles = 2", "bundles = 1"))


def test_engines_of_one_bundle_share_its_devices(tmp_path: Path) -> None:
    file = loaded(tmp_path, GOOD.replace("bundles = 2", "bundles = 1"))
    home = on_node(file, 0, "0", "1")
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in home.engines] == ["0", "1"]
    part_of_one = loaded(tmp_path, GOOD.replace("bundles = 2", "bundles = 1").replace("GPU = 2", "GPU = 0.5"))
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in on_node(part_of_one, 0, "3").engines] == ["3", "3"]


@pytest.mark.parametrize(
    ("change", "by", "words"),
    [
        ("bundles = 2", "bundle = 2", ["unknown field `bundle`", "$.ray"]),
        ("bundles = 2", "bundles = 0", ["$.ray.bundles 0"]),
        ("bundles = 2", "bundles = 3", ["$.ray.bundles 3 cannot take 2 engines evenly"]),
        ("spares = 1", "spares = -1", ["$.ray.spares -1"]),
        ("spares = 1", 'strategy = "AROUND"', ["$.ray.strategy", "AROUND"]),
        ("CPU = 4", "CPU = 0", ["$.ray.resources.CPU 0"]),
        ("CPU = 4, GPU = 2", "", ["$.ray.resources is empty"]),
        ("GPU = 2", "GPU = 1.5", ["$.ray.resources.GPU 1.5 cannot be dealt evenly to 1 engines"]),
        ('job = "grpo-1"', 'job = "G"', ["$.job", "'G'"]),
        ('job = "grpo-1"', 'job = "grpo-1"\nnode = "a"', ["unknown field `node`", "a"]),
        ('name = "e1"', 'name = "e0"', ["$.engines[0].name 'e0' stands twice"]),
        ('name = "e1"', 'name = "e1"\nkid = 1', ["unknown field `kid`", "$.engines[1]"]),
        (
            'name = "e1"',
            'name = "e1"\nenv = { CUDA_VISIBLE_DEVICES = "1" }',
            ["$.engines[1].env.CUDA_VISIBLE_DEVICES", "Ray gives the devices"],
        ),
        ("[ray]", "[rays]", ["unknown field `rays`"]),
        (GOOD, "job = 1 = 2", ["is not TOML"]),
    ],
)
def test_a_wrong_job_file_is_named_with_the_place(
    tmp_path: Path, change: str, by: str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as error:
        loaded(tmp_path, GOOD.replace(change, by))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_a_node_lacks_is_named_with_the_place_in_the_jobs_file(tmp_path: Path) -> None:
    file = loaded(
        tmp_path,
        GOOD.replace(f'name = "e1"\ncommand = ["{sys.executable}"', 'name = "e1"\ncommand = ["no-such"'),
    )
    with pytest.raises(UsageError, match=r"10\.0\.0\.1: \$\.engines\[1\]\.command\[0\] 'no-such'"):
        on_node(file, 0)


@pytest.mark.parametrize(
    ("strategy", "free", "said"),
    [
        ("STRICT_SPREAD", [{"CPU": 8.0}], "no node with 2 GPU free"),
        (
            "STRICT_SPREAD",
            [{"CPU": 8.0, "GPU": 9.0}] * 2,
            "2 of 3 bundles fit, and for the others there is no node with 2 GPU and 4 CPU free",
        ),
        (
            "PACK",
            [{"CPU": 9.0, "GPU": 9.0}],
            "2 of 3 bundles fit, and for the others there is no node with 2 GPU and 4 CPU free",
        ),
        ("STRICT_PACK", [{"CPU": 12.0, "GPU": 5.0}], "no node with 6 GPU free"),
        ("PACK", [], "no node with 2 GPU and 4 CPU free"),
    ],
)
def test_what_a_cluster_lacks_is_named(
    tmp_path: Path, strategy: str, free: list[dict[str, float]], said: str
) -> None:
    file = loaded(tmp_path, f'{GOOD}strategy = "{strategy}"\n')
    assert cluster.shortage(file, free) == said


def test_a_job_file_that_is_not_there_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ray", "up", "--bus", "redis://127.0.0.1:1", "--config", str(tmp_path / "no.toml")]
    assert main(words) == 2
    assert "no.toml' cannot be read" in capsys.readouterr().err


# --- agents, without Ray ---------------------------------------------------------------------------


@contextmanager
def raylet() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for one."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def ended(file: NodeFile) -> Iterator[None]:
    """No agent of the folder lives on, nor anything of its engines."""
    with swept(file):
        try:
            yield
        finally:
            if (left := tending.alive(file.state_path)) is not None:
                kill(left)


def a_second_one(file: NodeFile, url: str) -> int:
    """The exit code of another agent of the same folder."""
    words = [sys.executable, "-m", host.__name__, str(file.state_path)]
    return subprocess.run(
        words, env={**os.environ, host.BUS: url}, capture_output=True, check=False
    ).returncode


class Up(NamedTuple):
    """An agent of a raylet, and its engine."""

    file: NodeFile
    ray: "subprocess.Popen[bytes]"
    url: str
    player: Player
    agent: Process
    engine: EngineStarted

    def ensured(self) -> Process:
        """The agent, started where it is not there."""
        return tending.ensure(self.file, tending.identity(self.ray.pid), bus_url=self.url)

    def end(self) -> None:
        tending.end(self.file.state_path, bus_url=self.url, within_s=30)

    @property
    def lives(self) -> list[bool]:
        """Of each of the engine's processes."""
        return [alive(process) for process in self.engine.processes]


@pytest.fixture
async def up(server: Embedded, tmp_path: Path, stub_model: Path) -> AsyncIterator[Up]:
    file = node_support.node_file(tmp_path / "node", engine(stub_model))
    with ended(file), raylet() as ray:
        async with playing(server.url) as player:
            agent = tending.ensure(file, tending.identity(ray.pid), bus_url=server.url)
            await player.wait(NodeUp)
            started = await player.ask(EngineStarted, player.start())
            yield Up(file, ray, server.url, player, agent, started)


async def test_an_agent_outlives_whoever_started_it_is_found_again_and_ended_with_its_engines(up: Up) -> None:
    assert up.ensured() == up.agent == tending.alive(up.file.state_path)
    told = Path(f"/proc/{up.agent.pid}/stat").read_text().rpartition(")")[2].split()
    assert int(told[3]) == up.agent.pid  # a session of its own
    kill(up.agent)
    assert tending.wait_end(up.agent, within_s=10)
    again = up.ensured()
    assert again != up.agent and all(up.lives)
    assert a_second_one(up.file, up.url) == host.REFUSED
    assert not up.player.seen(EngineDead)
    up.end()
    assert not any(up.lives) and not alive(again)
    assert (await up.player.wait(EngineStopped)).proof.port_free


async def test_an_agent_whose_raylet_has_ended_stops_its_engines_says_so_and_ends(up: Up) -> None:
    assert tending.alive(up.file.state_path) == up.agent
    up.ray.kill()
    up.ray.wait()
    stopped = await up.player.wait(EngineStopped)
    assert set(up.engine.processes) <= set(stopped.proof.processes)
    assert tending.wait_end(up.agent, within_s=20)
    assert not any(up.lives)


async def test_engines_of_an_agent_that_is_dead_are_ended_by_a_successor(up: Up) -> None:
    assert tending.alive(up.file.state_path) == up.agent
    kill(up.agent)
    assert tending.wait_end(up.agent, within_s=10)
    assert tending.left(up.file) == ["e0"]
    up.end()
    assert not any(up.lives) and tending.left(up.file) == []
    assert tending.alive(up.file.state_path) is None


def test_a_ray_that_kills_what_outlives_its_actors_is_refused() -> None:
    code = (
        "from relight.agents.adapters.ray import tending; from relight.agents.node import pidfd\n"
        "tending.refuse_subreaper(); pidfd.become_subreaper()\n"
        "try: tending.refuse_subreaper()\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "raylet_subreaper is set" in done.stdout


async def test_up_waits_on_while_the_bus_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = loaded(tmp_path)
    held = [Held(at, f"n{at}", "h", f"bundle-{at}", (), (), 100 + at, None) for at in range(3)]
    monkeypatch.setattr(cluster, "view", lambda _: held)
    waiting, looks, said = Waiting(file, "redis://bus"), iter(range(100)), ""

    async def pulses() -> dict[Source, Pulse]:
        nonlocal said
        look = next(looks)
        if look == 1:
            raise BusUnavailable("bus redis://bus cannot be reached")
        said = said or (waiting.what if look == 2 else "")
        return {agent_source(NodeName(each.node)): Pulse(BootId("b"), look) for each in held}

    with anyio.fail_after(20):
        await waiting.on_the_bus(pulses)
    assert said == "bus redis://bus cannot be reached"
    assert waiting.held == held


# --- with Ray --------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_the_short_matrix_comes_out_as_it_should() -> None:
    words = [sys.executable, "-m", "tests.ray_faults", "--short"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 fell short, " in done.stdout.splitlines()[-1]
