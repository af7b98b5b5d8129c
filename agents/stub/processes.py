"""Starting the stub's processes, and what they leave on the machine.

Children get vLLM's titles as an argument (`VLLM::EngineCore`, `VLLM::Worker`) and an environment without the
starter's own variables: in vLLM the title overwrites them, so tags set there are not found on children.
"""

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path

_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "TMPDIR", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH",
         "VIRTUAL_ENV", "VLLM_PROCESS_NAME_PREFIX")  # fmt: skip
_SEGMENT_BYTES = 1 << 16
_PACKAGE = "relight.agents.stub"
SILENT_AFTER_S = 0.2
"""What a core does with a compiled object before it goes on: nothing that is seen from outside."""


def spawn(
    module: str, title: str, fds: Sequence[int] = (), *arguments: str, session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a module of the stub with `fds` inherited under their numbers, its title in the command line."""
    command = [sys.executable, "-m", f"{_PACKAGE}.{module}", title, *map(str, fds), *arguments]
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return subprocess.Popen(
        command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL, start_new_session=session
    )


def connected_child(module: str, title: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module of the stub and keep this end of a socket pair with it."""
    ours, theirs = socket.socketpair()
    with theirs:
        return spawn(module, title, (theirs.fileno(),)), ours


def compile_for(seconds: float) -> None:
    """Run two children that are called like compilers, one after the other, and be silent after each."""
    compiler = Path(tempfile.gettempdir()) / "cc1plus"
    if not compiler.exists():
        compiler.symlink_to(sys.executable)
    for _ in range(2):
        work = f"import time; time.sleep({seconds / 2})"  # what it does, it does for so long
        subprocess.run([compiler, "-I", "-S", "-c", work], check=False)
        time.sleep(SILENT_AFTER_S)  # the core is one thread, and is to answer nothing


def end(child: subprocess.Popen[bytes], within_s: float) -> None:
    """Ask a child to end by SIGTERM, and make it end by SIGKILL once that time is over."""
    child.terminate()
    try:
        child.wait(within_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def leave_socket() -> Path:
    """A bound unix socket under TMPDIR, as vLLM's channels are; the caller removes it on a clean exit."""
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    name = f"stub-{uuid.uuid4()}.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as channel:
        channel.bind(f"/proc/self/fd/{folder}/{name}")  # a unix socket's path is short, TMPDIR may be long
    os.close(folder)
    return Path(tempfile.gettempdir()) / name


@contextlib.contextmanager
def shared_segment(prefix: str) -> Generator[None]:
    """A mapped segment of shared memory, uniquely named; removed when left without an exception."""
    path = Path("/dev/shm") / f"psm_{prefix}_{uuid.uuid4().hex}"  # noqa: S108 the place is the point
    with path.open("wb+") as file:
        file.truncate(_SEGMENT_BYTES)
        with mmap.mmap(file.fileno(), _SEGMENT_BYTES):
            yield
    path.unlink(missing_ok=True)
