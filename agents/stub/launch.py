"""Starting stub engines from tests and demos, and talking to them without an event loop.

Everything of one stub carries a title prefix of its own, by which `launch` finds and ends what is left of the
tree, strays and orphans included. Each wait has a deadline.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Generator
from pathlib import Path

from relight.agents.stub.client import ANSWER_S, Client

START_S = 20.0
"""Until a stub listens: a fraction of a second, but test machines stall."""


def make_model(folder: Path, *, seed: int, shards: int = 1) -> Path:
    """Write a tiny model whose values follow from `seed`; the number of shards does not change its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    values = random.Random(seed)  # noqa: S311 not a secret
    tensors = {f"layer.{index}.weight": values.randbytes(64) for index in range(4)}
    for shard in range(shards):
        names = sorted(tensors)[shard::shards]
        header = {
            name: {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * at, 64 * at + 64]}
            for at, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + b"".join(tensors[name] for name in names)
        (folder / f"model-{shard + 1:05}-of-{shards:05}.safetensors").write_bytes(content)
    return folder


class Stub(Client):
    """One started stub: its processes, its output so far, and its HTTP API."""

    def __init__(self, process: subprocess.Popen[bytes], prefix: str) -> None:
        self.process = process
        self.prefix = prefix
        super().__init__()
        self.lines: list[str] = []
        self._listening = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            text = raw.decode(errors="replace").rstrip("\n")
            self.lines.append(text)
            if "Application startup complete." in text:
                self.port = int(text.rpartition(":")[2])
                self._listening.set()

    def close(self) -> None:
        """Stop reading; for the end, when no process holds the pipe any more."""
        self._reading.join(ANSWER_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def wait_until_listening(self) -> None:
        """Until the API answers; raises `TimeoutError` with the output so far."""
        if not self._listening.wait(START_S):
            raise TimeoutError(f"no stub within {START_S} s: {self.lines}")

    def pid_of(self, title: str) -> int:
        """The process whose title is `{prefix}::{title}`."""
        (pid,) = pids_with(f"{self.prefix}::{title}")
        return pid

    @property
    def core(self) -> int:
        """The engine core's process id."""
        return self.pid_of("EngineCore")

    @property
    def worker(self) -> int:
        """The worker's process id."""
        return self.pid_of("Worker")


@contextlib.contextmanager
def launch(model: Path, *flags: str, wait: bool = True, **environment: str) -> Generator[Stub]:
    """A stub on a free port, up unless `wait` is False; all that is left of it is killed at the end."""
    prefix = f"STUB{uuid.uuid4().hex[:12]}"
    command = [sys.executable, "-m", "relight.agents.stub", "--model", str(model), "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        env={**os.environ, "VLLM_PROCESS_NAME_PREFIX": prefix, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    stub = Stub(process, prefix)
    try:
        if wait:
            stub.wait_until_listening()
        yield stub
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in pids_with(f"{prefix}::"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_gone(pid)
        process.wait(ANSWER_S)
        for segment in Path("/dev/shm").glob(f"psm_{prefix}_*"):  # noqa: S108 the place is the point
            segment.unlink(missing_ok=True)
        stub.close()


def pids_with(title: str) -> list[int]:
    """Living processes that have an argument starting with `title`."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and f"\0{title}".encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def wait_gone(pid: int, within_s: float = ANSWER_S) -> None:
    """Until a process, ours or not, has ended; raises `TimeoutError`."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(within_s * 1000):
            raise TimeoutError(f"process {pid} still there after {within_s} s")
    finally:
        os.close(descriptor)
