"""The job around the trainer: a bus, an orchestrator, and a node agent with two vLLM engines, as processes.

They are what `relight bus`, `relight orchestrate` and `relight agent` start on any machine; only the model
and vLLM's flags are chosen for a CPU. The two files that they read stand here as they are written.
"""

import os
import sys
from pathlib import Path

import anyio
import task

from relight.events.bus.follow import Decided, Follower
from relight.events.bus.job import JobBus
from relight.events.decisions import EngineRetired, RouteAdded
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.services import Service, Services

JOB = "grpo-tiny"
ENGINES = 2
"""One serves while the other is started again."""
RELIGHT = (sys.executable, "-m", "relight.orchestrator.cli")
BUS_S, SERVING_S = 60.0, 300.0
"""For the bus, and for all engines: vLLM imports for 20 s on two idle cores."""

NODE = """\
job = "grpo-tiny"
node = "node-a"
host = "127.0.0.1"
state_dir = "{root}/node"
"""
ENGINE = """
[[engines]]
name = "engine-{number}"
model = "{root}/model"
cache_dir = "{root}/cache"
command = ["nice", "-n", "5", "{python}", "-m", "vllm.entrypoints.openai.api_server",
           "--model", "{{weights}}", "--host", "127.0.0.1", "--port", "{{port}}", "--skip-tokenizer-init",
           "--dtype", "float32", "--enforce-eager", "--max-model-len", "128",
           "--enable-scale-out", "--stream-interval", "4"]

[engines.env]
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
VLLM_NO_USAGE_STATS = "1"
TORCHDYNAMO_DISABLE = "1"
HF_HUB_OFFLINE = "1"
"""
SETTINGS = """\
[defaults]
restarts = 100         # engines die here more often than anywhere else
backoff_s = 0.0
"""


def environment(root: Path) -> dict[str, str]:
    """This one; temporary files lie below `root`, and one thread each leaves the cores to all of them."""
    scratch = root / "tmp"
    scratch.mkdir()
    return {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


async def start(services: Services, root: Path) -> str:
    """Start everything but the trainer; the bus's URL. Raises DemoFailed."""
    task.make_model(root / "model")
    tables = [ENGINE.format(root=root, number=number, python=sys.executable) for number in range(ENGINES)]
    (root / "node.toml").write_text(NODE.format(root=root) + "".join(tables))
    (root / "orchestrator.toml").write_text(SETTINGS)
    (root / "bus").mkdir()
    bus = await services.start("bus", (*RELIGHT, "bus", "--port", "0", "--dir", f"{root}/bus"), pipes=True)
    url = await bus.line(within_s=BUS_S)
    decide = ("orchestrate", "--bus", url, "--job", JOB, "--config", f"{root}/orchestrator.toml")
    await services.start("orchestrator", (*RELIGHT, *decide))
    own = ("agent", "--bus", url, "--config", f"{root}/node.toml", "--stop-engines")
    await services.start("agent", (*RELIGHT, *own))
    return url


async def serving(job: JobBus) -> None:
    """Return once every engine is routed; raises DemoFailed."""
    follower = Follower(job)
    routed: set[str] = set()
    with anyio.move_on_after(SERVING_S):
        while len(routed) < ENGINES:
            match await follower.next():
                case Decided(decision=RouteAdded(engine=engine)):
                    routed.add(engine)
                case Decided(decision=EngineRetired(engine=engine, reason=why)):
                    raise DemoFailed(f"{engine} cannot be started: {why}")
                case _:
                    pass
        return
    raise DemoFailed(f"{len(routed)} of {ENGINES} engines were up within {SERVING_S:g} s")


async def train(services: Services, root: Path, url: str, *, name: str, runs: tuple[str, ...]) -> Service:
    """Start train.py with the options `runs`, as the service `name`."""
    options = ("--bus", url, "--job", JOB, "--model", f"{root}/model", "--snapshots", f"{root}/weights")
    script = Path(__file__).with_name("train.py")
    return await services.start(name, (sys.executable, str(script), *options, *runs), pipes=True)
