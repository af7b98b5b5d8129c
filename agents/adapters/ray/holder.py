"""The actor in one bundle: it holds what is reserved there and keeps one agent running on its node.

It never restarts by itself (`max_restarts=0`): the overseer makes a successor, under the next number. What
the agent and its engines are doing is none of its business; they outlive it.
"""

import logging
import os
import threading
from pathlib import Path
from typing import NamedTuple

from relight.agents.adapters.ray import host, tending
from relight.agents.adapters.ray.jobfile import JobFile, node_file
from relight.agents.adapters.ray.names import api
from relight.agents.node import proc
from relight.agents.node.config import DEVICES, NodeFile
from relight.agents.node.proc import Liveness
from relight.events import codec
from relight.events.errors import RelightError, UsageError

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Between two tries to start an agent that does not come up."""


class Held(NamedTuple):
    """What a holder tells of its bundle."""

    bundle: int
    ray_node: str
    host: str
    node: str
    devices: tuple[str, ...]
    engines: tuple[str, ...]
    """Whose home it is."""
    agent: int | None
    """Its pid, where it lives."""
    problem: str | None
    """Why there is none."""
    fatal: bool = False
    """Whether the file, or the way Ray was started, has to be changed."""


class Holder:
    """Plain Python; the overseer makes an actor of it."""

    def __init__(self, job_file: str, bundle: int, bus_url: str) -> None:
        file = codec.from_json(job_file, JobFile)
        self._bus_url = bus_url
        self._ended = threading.Event()
        where = _where()
        self._raylet = tending.identity(int(os.environ.get("RAY_RAYLET_PID", os.getppid())))
        self._held = Held(bundle, where.node, where.host, "", where.devices, (), None, None)
        self._file: NodeFile | None = None
        try:
            tending.refuse_subreaper()
            mine = node_file(file, bundle, ray_node=where.node, host=where.host, devices=where.devices)
        except UsageError as error:
            self._held = self._held._replace(problem=str(error), fatal=True)
            return
        self._file = mine
        engines = tuple(engine.name for engine in mine.engines)
        self._held = self._held._replace(node=mine.node, engines=engines)
        self._thread = threading.Thread(target=self._keep, name="keeps the agent", daemon=True)
        self._thread.start()

    def held(self) -> Held:
        """What is here now."""
        return self._held

    def end(self) -> None:
        """Start no agent any more; the one that runs is another's to end."""
        self._ended.set()

    def _keep(self) -> None:
        assert self._file is not None
        bury(self._file.state_path.parent, bus_url=self._bus_url)
        while not self._ended.is_set():
            try:
                agent = tending.ensure(self._file, self._raylet, bus_url=self._bus_url)
            except (RelightError, OSError) as error:
                log.error("no agent comes up node=%s error=%s", self._file.node, error)
                self._held = self._held._replace(agent=None, problem=str(error))
                self._ended.wait(AGAIN_S)
                continue
            self._held = self._held._replace(agent=agent.pid, problem=None)
            while not self._ended.is_set() and not tending.wait_end(agent, within_s=AGAIN_S):
                pass
            why = tending.last_line(self._file.state_path / host.LOG)
            self._held = self._held._replace(agent=None, problem=f"its agent has ended: {why}")


class Where(NamedTuple):
    """On which node this process is, and what it was given there."""

    node: str
    host: str
    devices: tuple[str, ...]


def _where() -> Where:
    ray = api()
    context = ray.get_runtime_context()
    given = context.get_accelerator_ids().get("GPU", [])
    told = next((os.environ[name] for name in DEVICES if os.environ.get(name)), "")
    devices = tuple(told.split(",")) if given and told else ()
    return Where(context.get_node_id(), ray.util.get_node_ip_address(), devices)


def bury(base: Path, *, bus_url: str) -> None:
    """End what agents of lost raylets have left on this machine: nothing is reserved for it any more.

    Each speaks as the node that it was, so that the orchestrator hears what became of that.
    """
    for folder in sorted(base.iterdir()) if base.is_dir() else ():
        known = host.read(folder) if folder.is_dir() else None
        if known is None or proc.liveness(known.raylet) is not Liveness.DEAD or tending.alive(folder):
            continue
        file = codec.from_json((folder / host.FILE).read_bytes(), NodeFile)
        if tending.left(file):
            log.warning("an agent is started to end what a lost node has left node=%s", file.node)
            try:
                tending.start(folder, None, bus_url=bus_url)
            except RelightError as error:
                log.error("what a lost node has left is not ended node=%s error=%s", file.node, error)
