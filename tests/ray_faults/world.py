"""A Ray cluster of several raylets, a bus, an orchestrator, and a job that the real command line begins."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from relight.agents.adapters.ray import host, jobfile, names
from relight.agents.adapters.ray.jobfile import JobFile
from relight.agents.node import marks, proc
from relight.agents.node.record import Record
from relight.events import codec
from relight.events.bus.embedded import Embedded, embedded, free_port
from relight.events.ids import EngineName
from relight.events.values import Process
from tests.conftest import write_model

HEALTH = {
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 10,
}
"""A raylet that is gone refuses ten looks within 5 s; one that is only slow, as on a busy machine, is not."""
ORCHESTRATOR = "[defaults]\nnode_silence_s = 6.0\nmove_after_s = 2.0\nbackoff_s = 0.2\nrestarts = 50\n"
JOINED = "joined the head"
"""By these words in its log a stub's further part is up."""
UP_S, DOWN_S = 90.0, 60.0
STARTS = 3
NODE_ARGS: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1}


class Engine(NamedTuple):
    """One incarnation that has processes on this machine."""

    node: str
    name: EngineName
    incarnation: int


class World:
    """What all cases share."""

    def __init__(self, root: Path, bus: Embedded) -> None:
        self.root = root
        self.bus = bus
        self.model = write_model(root / "model")
        self.cluster: Any = None
        self.jobs = 0

    def connect(self) -> None:
        """Be a driver, as operators of a cluster are."""
        import ray

        ray.init(
            address=self.cluster.address, namespace="relight", log_to_driver=False, logging_level="ERROR"
        )

    def add_node(self) -> Any:
        """One more node with a CPU and a GPU."""
        return self.cluster.add_node(**NODE_ARGS)

    def nodes_wanted(self, count: int) -> None:
        """As many nodes as that, besides the head."""
        while len(self.cluster.worker_nodes) < count:
            self.add_node()
        while len(self.cluster.worker_nodes) > count:
            self.cluster.remove_node(next(iter(self.cluster.worker_nodes)))

    def job(
        self,
        *,
        bundles: int,
        spares: int,
        knobs: tuple[str, ...] = (),
        program: str = sys.executable,
        over_all: bool = False,
    ) -> "Job":
        """A job of one engine a bundle, or of one `over_all` of them, under a name of its own."""
        self.jobs += 1
        stub = [program, "-m", "relight.agents.stub", "--model", str(self.model)]
        head = [*stub, "--host", "127.0.0.1", "--port", "{port}", *knobs]
        if not over_all:
            engines = "".join(_table(f"e{index}", head) for index in range(bundles))
        else:
            meet = ["--nnodes", "{parts}", "--node-rank", "{part}"]
            meet += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
            part = json.dumps([*stub, *meet, "--headless", *knobs])
            engines = _table("e0", [*head, *meet])
            engines += f"[[engines.parts]]\ncommand = {part}\nready = {json.dumps(JOINED)}\n" * (bundles - 1)
        return Job(self, f"job-{self.jobs}", bundles=bundles, spares=spares, engines=engines)

    def relight(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """One command line."""
        return subprocess.run(
            [sys.executable, "-m", "relight.orchestrator.cli", *words],
            env={**os.environ, "RELIGHT_BUS_URL": self.bus.url},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def _table(name: str, command: list[str]) -> str:
    return f"[[engines]]\nname = {json.dumps(name)}\ncommand = {json.dumps(command)}\n"


class Job:
    """One job in the cluster."""

    def __init__(self, world: World, name: str, *, bundles: int, spares: int, engines: str) -> None:
        """`engines`: the tables of its file."""
        self.world = world
        self.name = name
        self.path = world.root / f"{name}.toml"
        self.path.write_text(
            f'job = "{name}"\nstate_dir = "{world.root / "state"}"\n{engines}'
            f'[ray]\naddress = "{world.cluster.address}"\nbundles = {bundles}\nspares = {spares}\n'
            "resources = { CPU = 1, GPU = 1 }\n"
        )
        self.file: JobFile = jobfile.load(self.path)

    @property
    def folder(self) -> Path:
        return self.world.root / "state" / self.name

    def up(self, *, within_s: float = UP_S) -> "subprocess.CompletedProcess[str]":
        return self.world.relight("ray", "up", "--config", str(self.path), "--within", str(within_s))

    def down(self) -> "subprocess.CompletedProcess[str]":
        return self.world.relight("ray", "down", "--config", str(self.path), "--within", str(DOWN_S))

    def folders(self) -> list[Path]:
        """Of every agent that the job ever had."""
        return sorted(path for path in self.folder.glob("bundle-*") if (path / host.HOST).exists())

    def agents(self) -> dict[str, Process]:
        """The agents that live, by the names of their nodes."""
        known = {folder.name: host.read(folder) for folder in self.folders()}
        return {
            name: at.process
            for name, at in known.items()
            if at is not None and proc.liveness(at.process) is proc.Liveness.ALIVE
        }

    def engines(self) -> dict[Engine, frozenset[Process]]:
        """Every process of every engine, as the process table has it."""
        found: dict[Engine, frozenset[Process]] = {}
        for folder in self.folders():
            slot = marks.slot_id(self.file.job, state_dir=folder)
            for name in marks.engines_of(slot):
                for incarnation, processes in marks.family(slot, EngineName(name)).items():
                    found[Engine(folder.name, EngineName(name), incarnation)] = frozenset(processes)
        return found

    def member(self, name: str, role: str) -> Process:
        """One process of an engine, by its role."""
        for folder in self.folders():
            path = folder / "engines" / name / "record.json"
            record = codec.from_json(path.read_bytes(), Record) if path.exists() else None
            for member in record.members if record else ():
                if member.role == role and proc.liveness(member.process) is proc.Liveness.ALIVE:
                    return member.process
        raise LookupError(f"{name} has no living {role}")

    def leader(self, node: str, name: str) -> Process:
        """Of the engine's incarnation, or its part, on this node."""
        record = codec.from_json((self.folder / node / "engines" / name / "record.json").read_bytes(), Record)
        assert record.leader is not None
        return record.leader

    def folder_of(self, name: str) -> Path:
        """Of the agent whose engine of this name has processes."""
        return next(self.folder / engine.node for engine in self.engines() if engine.name == name)

    def holder(self, bundle: int) -> str:
        """The name of the bundle's newest actor."""
        return names.holder(self.file, bundle, max(names.numbers(self.file, bundle)))


def bundle_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def raylet_of(world: World, folder: Path) -> Any:
    """The cluster's node on which the agent of `folder` is."""
    return next(
        node for node in world.cluster.worker_nodes if folder.name.endswith(node.node_id[: jobfile.NODE_ID])
    )


def actor_process(folder: Path) -> int | None:
    """The pid of the actor that holds the bundle, by its class name; None before a process bears that."""
    known = host.read(folder)
    assert known is not None
    for stat in proc.all_stats().values():
        if stat.ppid == known.raylet.pid and "Holder" in proc.command_line(stat.pid):
            return stat.pid
    return None


def kill(process: Process) -> None:
    """SIGKILL exactly this process."""
    fd = os.pidfd_open(process.pid)
    try:
        stat = proc.read_stat(process.pid)
        assert stat is not None and stat.process == process
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    finally:
        os.close(fd)


@contextmanager
def _kept_elsewhere(root: Path) -> Iterator[None]:
    """What the GCS knows is in a Redis of its own, so that it may die."""
    with embedded(root / "gcs") as store:
        os.environ["RAY_REDIS_ADDRESS"] = store.url.removeprefix("redis://")
        try:
            yield
        finally:
            del os.environ["RAY_REDIS_ADDRESS"]


@contextmanager
def standing(*, gcs_may_die: bool = False) -> Iterator[World]:
    """A world with a head that holds nothing; whatever was begun in it is gone afterwards."""
    root = Path(tempfile.mkdtemp(prefix="relight-ray-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)  # behind Ray's own, which makes its folder again
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        bus = stack.enter_context(embedded(root / "bus"))
        if gcs_may_die:
            stack.enter_context(_kept_elsewhere(root))
        world = World(root, bus)
        world.cluster = _cluster(root)
        stack.callback(world.cluster.shutdown)
        settings = root / "orchestrator.toml"
        settings.write_text(ORCHESTRATOR)
        words = ["orchestrate", "--bus", bus.url, "--config", str(settings)]
        log = stack.enter_context((root / "orchestrator.log").open("wb"))
        orchestrator = subprocess.Popen(
            [sys.executable, "-m", "relight.orchestrator.cli", *words], stderr=log
        )
        stack.callback(orchestrator.wait, 20)
        stack.callback(orchestrator.terminate)
        world.connect()
        stack.callback(_leave)
        stack.callback(_sweep, world)
        yield world


def _cluster(root: Path) -> Any:
    """A head that holds nothing. Ray gives it 30 s to come up, which a busy machine may exceed."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH}
    for attempt in range(STARTS):
        try:
            # Where it notes down its address for whoever gives none: not where a user's own cluster does.
            os.environ["RAY_TMPDIR"] = str(root / str(attempt))
            arguments = {**head, "temp_dir": f"{os.environ['RAY_TMPDIR']}/ray"}
            return Cluster(initialize_head=True, head_node_args=arguments)
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _leave() -> None:
    import ray

    ray.shutdown()


def _sweep(world: World) -> None:
    """Kill what a case that fell short has left, by tag and by folder."""
    for base in (world.root / "state").glob("*"):
        job = Job.__new__(Job)
        job.world, job.name = world, base.name
        job.file = jobfile.load(world.root / f"{base.name}.toml")
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            left = [*job.agents().values(), *(each for group in job.engines().values() for each in group)]
            if not left:
                break
            for process in left:
                kill(process)
            time.sleep(0.05)
